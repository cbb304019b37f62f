"""Plots of a run, for ``summary.png`` and reports, and the style shared with the simulator's plots.

The SVGs in a report use CSS variables as colours, defined by the page for the light and the dark scheme.
PNGs use the light scheme.
"""

# matplotlib's annotations are partial
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib.util
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from roq.events.history import FATES
from roq.observe.metrics_log import Records
from roq.observe.summary import Summary
from roq.observe.timeline import Timeline, bins, overlap
from roq.text import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "LIGHT", "Drawn", "draw", "staleness_bars", "style", "usual_top", "write_summary_plot"]

COLORS = {
    "ink": ("#1f2933", "#e4e7eb"),
    "quiet": ("#616e7c", "#9aa5b1"),
    "grid": ("#e4e7eb", "#3e4c59"),
    "page": ("#ffffff", "#17191c"),
    "green": ("#2f855a", "#68d391"),
    "red": ("#c2410c", "#fb923c"),
    "amber": ("#b7791f", "#f6c75c"),
    "wait": ("#b8c2cc", "#7b8794"),
    "train": ("#4c63b6", "#98aeeb"),
    "stale0": ("#dbe4ff", "#e8eeff"),
    "stale1": ("#a3bffa", "#c3d4fb"),
    "stale2": ("#7f9cf5", "#9db4f8"),
    "stale3": ("#5a67d8", "#8291f0"),
    "stale4": ("#4c51bf", "#6f78e8"),
    "stale5": ("#2a2f6e", "#4a50b5"),
    "stale6": ("#1a1c4b", "#383c8f"),
}
"""Colours by name: (light scheme, dark scheme)."""

LIGHT = {name: light for name, (light, _) in COLORS.items()}
MOST_BARS = 256  # more values than these are drawn only where there are groups
SHADES = 7  # staleness colours, stale0 to stale6
WIDE = (10.0, 2.9)  # inches
SMOOTH = 5  # batches in the running mean
TIME_BINS = 60
FATE_COLOR = {
    "trained": "green",
    "open": "wait",
    "filtered": "amber",
    "discarded": "red",
    "requeued": "train",
    "dead": "ink",
}


class Drawn(NamedTuple):
    """A rendered plot."""

    name: str
    title: str
    svg: str
    png: bytes


class Bar(NamedTuple):
    """The data of a step; ``staleness`` counts groups or trajectories by staleness."""

    number: int
    reward: float | None
    staleness: Mapping[int, int]
    wait_s: float
    train_s: float


Paint = Callable[["Axes", Timeline, Sequence[Bar]], None]


def draw(timeline: Timeline) -> list[Drawn]:
    """Draw the plots of a report; none if the timeline has no step."""
    bars = [Bar(s.number, s.reward, s.staleness, s.wait_s, s.train_s or 0.0) for s in timeline.steps]
    return [_drawn(name, timeline, bars) for name in PLOTS if bars]


def _drawn(name: str, timeline: Timeline, bars: Sequence[Bar]) -> Drawn:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    title = PLOTS[name][0]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "hatch.linewidth": 0.8}):
        figure = Figure(figsize=WIDE, dpi=130, layout="constrained")
        _paint(figure, [name], timeline, bars)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", facecolor=LIGHT["page"])
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = svg.getvalue().decode()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    for color, light in LIGHT.items():
        text = text.replace(light, f"var(--{color})")
    return Drawn(name, title, text, png.getvalue())


def write_summary_plot(
    records: Records, timeline: Timeline, summary: Summary, run_dir: str | Path
) -> Path | None:
    """Draw ``summary.png`` in the run's folder; returns None without matplotlib or without a step.

    Steps come from the records, which are complete. The plot over time is omitted if ``timeline`` lacks
    events.
    """
    if not records.steps or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    bars = [
        Bar(s.step, s.reward_mean, {int(k): n for k, n in s.staleness_counts.items()}, s.wait_s, s.step_s)
        for s in records.steps
    ]
    names = ["reward", "staleness", "steps", *(["idle"] if timeline.steps and timeline.whole else [])]
    figure = Figure(figsize=(10, 2.6 * len(names) + 0.4), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(
        f"{summary.run}: {summary.steps} steps in {clock(summary.wall_s)}, η = {summary.eta}, "
        f"{summary.tokens_per_s:,.0f} tokens/s",
        x=0.012, ha="left", fontsize=13, fontweight="bold", color=LIGHT["ink"],
    )  # fmt: skip
    _paint(figure, names, timeline, bars)
    path = Path(run_dir) / "summary.png"
    new = path.with_name("summary.new.png")
    figure.savefig(new)
    new.replace(path)
    return path


def _paint(figure: Figure, names: Sequence[str], timeline: Timeline, bars: Sequence[Bar]) -> None:
    for name, axes in zip(names, figure.subplots(len(names), squeeze=False).ravel(), strict=True):
        title, paint = PLOTS[name]
        axes.set_title(title, loc="left", fontsize=10.5, color=LIGHT["ink"], pad=8)
        paint(axes, timeline, bars)
        style(axes)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(
                loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8, frameon=False, fontsize=8.5,
                labelcolor=LIGHT["ink"], handlelength=1.2, columnspacing=1.4, borderaxespad=0.3,
            )  # fmt: skip


def style(axes: Axes) -> None:
    """Apply the common style to axes."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["quiet"])
    axes.tick_params(colors=LIGHT["quiet"], labelsize=9, length=0)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.xaxis.label.set(color=LIGHT["quiet"], fontsize=9)


def _steps(axes: Axes, bars: Sequence[Bar]) -> list[int]:
    """Set up an x axis of step numbers."""
    from matplotlib.ticker import MaxNLocator

    x = [bar.number for bar in bars]
    axes.set_xlim(x[0] - 0.6, x[-1] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("optimizer step")
    return x


def _time_axis(axes: Axes, timeline: Timeline) -> Callable[[float], float]:
    """Set up an x axis of time since the first issue; returns the function from time to position."""
    units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    unit, name = next(((u, n) for u, n in units if timeline.work_s >= 3 * u), units[-1])
    axes.set_xlabel(f"{name} since the first trajectory was issued")
    axes.set_xlim(0, (timeline.work_s or 1.0) / unit)
    return lambda time: (time - timeline.at_work) / unit


def _whole_ticks(axes: Axes, most: int, count: int = 5) -> None:
    """Set integer ticks up to ``most``, so that a full batch is at a tick."""
    step = next((n for n in range(1, most + 1) if most % n == 0 and most // n <= count), most)
    axes.set_yticks(range(0, most + 1, step))
    axes.set_ylim(0, most * 1.02)


def staleness_bars(
    axes: Axes, x: Sequence[int], counts: Sequence[Mapping[int, int]], most: int, *, limit: int, width: float
) -> int:
    """Draw a stacked bar of counts by staleness, 0 to ``most``, at each ``x``; returns the highest sum."""
    bottom = [0] * len(x)
    found = {staleness for count in counts for staleness in count}
    for staleness in range(most + 1) if most < MOST_BARS else sorted(found):
        height = [count.get(staleness, 0) for count in counts]
        shade = staleness if most < SHADES else staleness * SHADES // (most + 1)
        color = LIGHT["red"] if staleness > limit else LIGHT[f"stale{shade}"]
        label = f"{staleness}" + " above η" * (staleness > limit)
        axes.bar(x, height, bottom=bottom, width=width, color=color, label=label)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    return max(bottom)


def _staleness(axes: Axes, timeline: Timeline, bars: Sequence[Bar]) -> None:
    counts = [bar.staleness for bar in bars]
    most = max(timeline.eta, *(max(count, default=0) for count in counts))
    highest = staleness_bars(axes, _steps(axes, bars), counts, most, limit=timeline.eta, width=0.82)
    _whole_ticks(axes, highest or 1)


def _reward(axes: Axes, _: Timeline, bars: Sequence[Bar]) -> None:
    scored = [(bar.number, bar.reward) for bar in bars if bar.reward is not None]
    _steps(axes, bars)
    if not scored:
        return
    x, y = zip(*scored, strict=True)
    smooth = [fmean(y[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(y))]
    axes.plot(x, y, "o", color=LIGHT["green"], alpha=0.4, markersize=4, markeredgewidth=0, label="batch")
    axes.plot(x, smooth, color=LIGHT["green"], linewidth=2.2, label=f"mean of the last {SMOOTH}")
    axes.annotate(
        f"{smooth[-1]:.2f}", (x[-1], smooth[-1]), xytext=(7, 0), textcoords="offset points",
        va="center", color=LIGHT["green"], fontsize=10, fontweight="bold", annotation_clip=False,
    )  # fmt: skip
    if min(y) >= 0 and max(y) <= 1:
        axes.set_ylim(0, 1.02)


def _throughput(axes: Axes, timeline: Timeline, _: Sequence[Bar]) -> None:
    parts = bins(timeline, TIME_BINS)
    width = (parts[0][1] - parts[0][0]) or 1.0
    tokens: dict[str, Counter[int]] = {}
    for group in timeline.groups.values():
        fate = group.state if group.state in ("trained", *FATES) else "open"
        for member in group.members.values():
            if member.completed is not None:
                place = min(len(parts) - 1, int((member.completed - timeline.at_work) / width))
                tokens.setdefault(fate, Counter())[place] += member.tokens
    middle = [start + width / 2 for start, _ in parts]
    scale = _time_axis(axes, timeline)
    bottom = [0.0] * len(parts)
    for fate, color in FATE_COLOR.items():
        if fate not in tokens:
            continue
        height = [tokens[fate][i] / width for i in range(len(parts))]
        waste = fate in FATES
        axes.bar(
            [scale(time) for time in middle],
            height,
            bottom=bottom,
            width=(scale(parts[0][1]) or 1.0) * 0.92,
            label="in the run" if fate == "open" else fate,
            facecolor="none" if waste else LIGHT[color],
            edgecolor=LIGHT[color] if waste else "none",
            hatch="////" if waste else None,
            linewidth=0.6,
        )
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]


def _idle(axes: Axes, timeline: Timeline, _: Sequence[Bar]) -> None:
    parts = bins(timeline, TIME_BINS)
    scale = _time_axis(axes, timeline)
    middle = [scale((start + end) / 2) for start, end in parts]
    trainer = [overlap(timeline.waits, part) / ((part[1] - part[0]) or 1.0) for part in parts]
    workers = [timeline.idle_share(part) for part in parts]
    axes.fill_between(middle, trainer, color=LIGHT["wait"], step="mid", label="trainer waits for a batch")
    known = [(x, y) for x, y in zip(middle, workers, strict=True) if y is not None]
    if known:
        label = "workers with nothing in flight"
        axes.plot(*zip(*known, strict=True), color=LIGHT["red"], linewidth=1.8, label=label)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _times(axes: Axes, _: Timeline, bars: Sequence[Bar]) -> None:
    x = _steps(axes, bars)
    train, wait = [bar.train_s for bar in bars], [bar.wait_s for bar in bars]
    axes.bar(x, train, width=0.82, color=LIGHT["train"], label="trains")
    axes.bar(x, wait, bottom=train, width=0.82, color=LIGHT["wait"], label="waits")
    _clip_outliers(axes, x, [a + b for a, b in zip(train, wait, strict=True)], LIGHT["quiet"])


def _clip_outliers(axes: Axes, x: Sequence[int], heights: Sequence[float], color: str) -> None:
    """Limit the y axis so that a few outliers do not flatten the rest; label the clipped bars' heights."""
    top = usual_top(heights)
    axes.set_ylim(0, top)
    for place, height in zip(x, heights, strict=True):
        if height > top:
            side, ha = (0.5, "left") if place < (x[0] + x[-1]) / 2 else (-0.5, "right")
            axes.annotate(f"{height:.0f} s", (place + side, top), va="top", ha=ha, color=color, fontsize=8.5)


def usual_top(heights: Sequence[float]) -> float:
    """Return the top of an axis: above all values, or above all but a few outliers.

    >>> usual_top([2.0] * 40 + [4.0]), usual_top([2.0] * 40 + [50.0])
    (4.4, 3.5)
    """
    ordered = sorted(heights)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    top = 1.1 * ordered[-1] if ordered[-1] <= 2.5 * usual else 1.75 * usual
    return top or 1.0


PLOTS: dict[str, tuple[str, Paint]] = {
    "staleness": ("Staleness of each batch, in versions", _staleness),
    "reward": ("Mean reward of each batch", _reward),
    "throughput": ("Response tokens completed per second, by their group's fate", _throughput),
    "idle": ("Waiting and idle time", _idle),
    "steps": ("Seconds of each step", _times),
}
