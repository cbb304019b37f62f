"""A run in one picture, ``summary.png``: reward, staleness and waiting, step by step."""

# matplotlib's annotations are partial
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from roq.observe.figures import usual_top, whole_ticks
from roq.observe.metrics_log import Records, Step, WorkerLine
from roq.observe.summary import Summary
from roq.text import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_plot"]

INK, QUIET, GRID = "#1f2933", "#7b8794", "#e4e7eb"
GREEN, RED, AMBER = "#2f855a", "#c2410c", "#b7791f"
BLUES = ("#c3dafe", "#7f9cf5", "#4c51bf", "#2a2f6e")  # fresh to stale
SMOOTH = 5  # batches in the running mean


def write_plot(records: Records, summary: Summary, run_dir: str | Path) -> Path | None:
    """Draw ``summary.png`` in the run's folder; None without matplotlib or without a step to show."""
    steps = records.steps
    if not steps or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 8.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, waiting = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [1.5, 1, 1]}
    )
    figure.suptitle(
        f"{summary.run}: {summary.steps} steps in {clock(summary.wall_s)}, η = {summary.eta}, "
        f"{summary.tokens_per_s:,.0f} tokens/s",
        x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK,
    )  # fmt: skip
    _reward(reward, steps)
    _staleness(staleness, steps, summary.eta)
    _waiting(waiting, records)
    for axes in (reward, staleness, waiting):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(QUIET)
        axes.tick_params(colors=QUIET, labelsize=9, length=0)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(0.4, steps[-1].step + 0.6)
    waiting.set_xlabel("optimizer step", color=QUIET, fontsize=9)
    waiting.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    path = Path(run_dir) / "summary.png"
    new = path.with_name("summary.new.png")
    figure.savefig(new)
    new.replace(path)
    return path


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, pad=8)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, frameon=False, fontsize=8.5,
        labelcolor=INK, handlelength=1.2, columnspacing=1.4, borderaxespad=0.3,
    )  # fmt: skip


def _reward(axes: Axes, steps: Sequence[Step]) -> None:
    scored = [(step.step, step.reward_mean) for step in steps if step.reward_mean is not None]
    _title(axes, "Mean reward of each batch")
    if not scored:
        return
    x, y = zip(*scored, strict=True)
    smooth = [fmean(y[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(y))]
    axes.plot(
        x, y, "o", color=GREEN, alpha=0.35, markersize=4, markeredgewidth=0, label="batch", clip_on=False
    )
    axes.plot(x, smooth, color=GREEN, linewidth=2.2, label=f"mean of the last {SMOOTH}")
    axes.annotate(
        f"{smooth[-1]:.2f}", (x[-1], smooth[-1]), xytext=(7, 0), textcoords="offset points",
        va="center", color=GREEN, fontsize=10, fontweight="bold", annotation_clip=False,
    )  # fmt: skip
    if min(y) >= 0 and max(y) <= 1:
        axes.set_ylim(0, 1.02)
    _legend(axes, 2)


def _staleness(axes: Axes, steps: Sequence[Step], eta: int) -> None:
    x = [step.step for step in steps]
    seen = {int(key) for step in steps for key in step.staleness_counts}
    bottom = [0.0] * len(steps)
    for staleness in range(max(seen | {eta}) + 1):
        height = [step.staleness_counts.get(str(staleness), 0) for step in steps]
        shade = BLUES[
            min(len(BLUES) - 1, staleness if eta < len(BLUES) else staleness * len(BLUES) // (eta + 1))
        ]
        color = RED if staleness > eta else shade
        label = str(staleness) + (" (above η)" if staleness > eta else "")
        axes.bar(x, height, bottom=bottom, width=0.82, color=color, label=label)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    whole_ticks(axes, round(max(bottom)) or 1)
    _title(axes, "Staleness of the batch's trajectories (versions behind)")
    _legend(axes, min(8, max(seen | {eta}) + 1))


def _waiting(axes: Axes, records: Records) -> None:
    steps = records.steps
    x = [step.step for step in steps]
    axes.bar(
        x, [step.wait_s for step in steps], width=0.82, color="#cbd2d9", label="trainer waits for a batch"
    )
    workers = [lines for lines in records.workers.values() if lines]
    shown = [step.wait_s for step in steps]
    if workers:
        starts = [steps[0].time - steps[0].wait_s - steps[0].step_s, *(step.time for step in steps)]
        spans = list(pairwise(starts))
        idle = [_per_worker(workers, span, "idle_s") for span in spans]
        blocked = [_per_worker(workers, span, "blocked_s") for span in spans]
        shown += blocked + idle
        axes.plot(x, idle, color=RED, linewidth=1.6, label="worker idle")
        axes.plot(x, blocked, color=AMBER, linewidth=1.6, label="worker with free places, window full")
    _title(axes, "Waiting, seconds per step")
    # The first wait holds the engines' start: neither it nor another outlier may flatten all the others.
    later = [value for i, value in enumerate(shown) if i % len(steps) > 0]
    top = usual_top(later or shown)
    axes.set_ylim(0, top)
    for place, step in zip(x, steps, strict=True):
        if step.wait_s > top:
            axes.annotate(f" {step.wait_s:.0f} s", (place + 0.4, top), va="top", color=QUIET, fontsize=9)
    _legend(axes, 3)


def _per_worker(workers: Sequence[Sequence[WorkerLine]], span: tuple[float, float], name: str) -> float:
    """How much a counter rose in a span of time, as the mean over the workers there at the time."""
    there = [
        lines for lines in workers if lines[0].time - lines[0].wall_s < span[1] and lines[-1].time > span[0]
    ]
    rises = [_at(lines, span[1], name) - _at(lines, span[0], name) for lines in there]
    return fmean(rises) if rises else 0.0


def _at(lines: Sequence[WorkerLine], time: float, name: str) -> float:
    """A counter's value at some time, between the lines in proportion; 0 before the process began."""
    after = bisect_right(lines, time, key=lambda line: line.time)
    if after == len(lines):
        return float(getattr(lines[-1], name))
    right = lines[after]
    left_time, left = (
        (lines[after - 1].time, float(getattr(lines[after - 1], name)))
        if after
        else (right.time - right.wall_s, 0.0)
    )
    if time <= left_time or right.time <= left_time:
        return left
    return left + (float(getattr(right, name)) - left) * (time - left_time) / (right.time - left_time)
