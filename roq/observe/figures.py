"""The figures of a report, drawn once for both colour schemes.

Colours are variables: an SVG that stands in the page takes them from its style sheet, a PNG has the light
ones.
"""

# matplotlib's annotations are partial
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from roq.events.history import FATES, Batch
from roq.observe.timeline import Timeline, bins, overlap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLORS", "FIGURES", "Drawn", "clip_outliers", "draw", "usual_top", "whole_ticks"]

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
    "stale0": ("#c3dafe", "#dbe7ff"),
    "stale1": ("#7f9cf5", "#9db4f8"),
    "stale2": ("#4c51bf", "#6f78e8"),
    "stale3": ("#2a2f6e", "#4a50b5"),
}
"""Name: (on a light page, on a dark one)."""

LIGHT = {name: light for name, (light, _) in COLORS.items()}
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
    """A figure: its title, and what it looks like."""

    name: str
    title: str
    svg: str
    png: bytes


def draw(timeline: Timeline) -> list[Drawn]:
    """Every figure that the timeline has something to show in."""
    if not timeline.steps:
        return []
    return [_drawn(name, title, timeline, paint) for name, (title, paint) in FIGURES.items()]


def _drawn(name: str, title: str, timeline: Timeline, paint: Callable[[Axes, Timeline], None]) -> Drawn:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "hatch.linewidth": 0.8}):
        figure = Figure(figsize=WIDE, dpi=130, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize=10.5, color=LIGHT["ink"], pad=8)
        paint(axes, timeline)
        _style(axes)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", facecolor=LIGHT["page"])
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = svg.getvalue().decode()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    for color, light in LIGHT.items():
        text = text.replace(light, f"var(--{color})")
    return Drawn(name, title, text, png.getvalue())


def _style(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["quiet"])
    axes.tick_params(colors=LIGHT["quiet"], labelsize=9, length=0)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.xaxis.label.set(color=LIGHT["quiet"], fontsize=9)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8, frameon=False, fontsize=8.5,
            labelcolor=LIGHT["ink"], handlelength=1.2, columnspacing=1.4, borderaxespad=0.3,
        )  # fmt: skip


def _steps(axes: Axes, steps: Sequence[Batch]) -> list[int]:
    """The steps' numbers as the x axis."""
    from matplotlib.ticker import MaxNLocator

    x = [step.number for step in steps]
    axes.set_xlim(x[0] - 0.6, x[-1] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("optimizer step")
    return x


def _time_axis(axes: Axes, timeline: Timeline) -> Callable[[float], float]:
    """The time since the first work as the x axis, from 0; returns where a time lies on it."""
    units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    unit, name = next(((u, n) for u, n in units if timeline.work_s >= 3 * u), units[-1])
    axes.set_xlabel(f"{name} since the first trajectory was issued")
    axes.set_xlim(0, (timeline.work_s or 1.0) / unit)
    return lambda time: (time - timeline.at_work) / unit


def whole_ticks(axes: Axes, most: int, count: int = 5) -> None:
    """Ticks of whole numbers, the greatest of which is ``most``: a full batch reads off at once."""
    step = next((n for n in range(1, most + 1) if most % n == 0 and most // n <= count), most)
    axes.set_yticks(range(0, most + 1, step))
    axes.set_ylim(0, most * 1.02)


def _staleness(axes: Axes, timeline: Timeline) -> None:
    x = _steps(axes, timeline.steps)
    counts = [step.staleness for step in timeline.steps]
    most = max(timeline.eta, *(max(count, default=0) for count in counts))
    bottom = [0] * len(x)
    for staleness in range(most + 1):
        height = [count[staleness] for count in counts]
        shade = staleness if most < 4 else staleness * 4 // (most + 1)
        color = LIGHT["red"] if staleness > timeline.eta else LIGHT[f"stale{shade}"]
        label = f"{staleness}" + " above η" * (staleness > timeline.eta)
        axes.bar(x, height, bottom=bottom, width=0.82, color=color, label=label)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    whole_ticks(axes, max(bottom))


def _reward(axes: Axes, timeline: Timeline) -> None:
    scored = [(step.number, step.reward) for step in timeline.steps if step.reward is not None]
    _steps(axes, timeline.steps)
    if not scored:
        return
    x, y = zip(*scored, strict=True)
    smooth = [fmean(y[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(y))]
    axes.plot(x, y, "o", color=LIGHT["green"], alpha=0.4, markersize=4, markeredgewidth=0, label="batch")
    axes.plot(x, smooth, color=LIGHT["green"], linewidth=2.2, label=f"mean of the last {SMOOTH}")


def _throughput(axes: Axes, timeline: Timeline) -> None:
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


def _idle(axes: Axes, timeline: Timeline) -> None:
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


def _times(axes: Axes, timeline: Timeline) -> None:
    x = _steps(axes, timeline.steps)
    train = [step.train_s or 0.0 for step in timeline.steps]
    wait = [step.wait_s for step in timeline.steps]
    axes.bar(x, train, width=0.82, color=LIGHT["train"], label="trains")
    axes.bar(x, wait, bottom=train, width=0.82, color=LIGHT["wait"], label="waited before")
    clip_outliers(axes, x, [a + b for a, b in zip(train, wait, strict=True)], LIGHT["quiet"])


def clip_outliers(axes: Axes, x: Sequence[int], heights: Sequence[float], color: str) -> None:
    """An axis that its highest few bars do not flatten: they are cut, and their height is written on them."""
    top = usual_top(heights)
    axes.set_ylim(0, top)
    for place, height in zip(x, heights, strict=True):
        if height > top:
            side, ha = (0.5, "left") if place < (x[0] + x[-1]) / 2 else (-0.5, "right")
            axes.annotate(f"{height:.0f} s", (place + side, top), va="top", ha=ha, color=color, fontsize=8.5)


def usual_top(heights: Sequence[float]) -> float:
    """Where an axis should end: above all, or above all but a few that would flatten the others.

    >>> usual_top([2.0] * 40 + [4.0]), usual_top([2.0] * 40 + [50.0])
    (4.4, 3.5)
    """
    ordered = sorted(heights)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    top = 1.1 * ordered[-1] if ordered[-1] <= 2.5 * usual else 1.75 * usual
    return top or 1.0


FIGURES: dict[str, tuple[str, Callable[[Axes, Timeline], None]]] = {
    "staleness": ("Staleness of each batch's groups, in versions", _staleness),
    "reward": ("Mean reward of each batch", _reward),
    "throughput": ("Response tokens finished per second, by what became of them", _throughput),
    "idle": ("Time without work", _idle),
    "steps": ("Seconds of each step", _times),
}
