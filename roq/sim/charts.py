"""The two figures of the article, with the simulation's own results; PNG and SVG."""

# matplotlib's annotations are partial
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from roq.observe.plots import LIGHT, staleness_bars, style
from roq.sim.experiments import Comparison, Row, Staleness
from roq.sim.tables import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_comparison", "draw_staleness"]

INK, QUIET, GREEN = LIGHT["ink"], LIGHT["quiet"], LIGHT["green"]
OURS, THEIRS, ABORTED, DROPPED = LIGHT["stale4"], LIGHT["stale1"], LIGHT["red"], LIGHT["amber"]


def _figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _save(figure: Figure, path: Path) -> list[Path]:
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in paths:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else {})
    return paths


def draw_staleness(found: Staleness, path: Path) -> list[Path]:
    """Stacked bars: trajectories of each batch by staleness, one panel for each eta; seed 0."""
    columns = min(3, len(found.rows))
    lines = -(-len(found.rows) // columns)
    figure = _figure(10, 0.8 + 2.3 * lines, "Trajectories of each batch by staleness (versions behind)")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    highest = max(max(row.trajectories) for row in found.rows)
    for row, axes in zip(found.rows, panels, strict=False):
        updates = row.first.updates
        x = [update.version + 1 for update in updates]
        counts = [update.staleness for update in updates]
        staleness_bars(axes, x, counts, highest, limit=highest, width=1.0)
        most = max(max(update.staleness) for update in updates)
        axes.set_title(f"η = {row.eta}: at most {most}", loc="left", fontsize=10, color=INK)
        axes.set_xlim(0.5, len(updates) + 0.5)
        style(axes)
    for axes in panels[len(found.rows) :]:
        axes.set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="upper right", ncols=highest + 1, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip
    figure.supxlabel("training batch", fontsize=9, color=QUIET)
    return _save(figure, path)


def draw_comparison(found: Comparison, path: Path) -> list[Path]:
    """Bars: effective throughput, what was thrown away hatched on top, roq's speed-up in green."""
    spans = ["cold", *(["steady"] if found.rows[0].steady else [])]
    figure = _figure(
        10.5, 0.8 + 3.0 * len(spans), "Effective throughput at equal maximum staleness, tokens/s"
    )
    etas = list(found.limits)
    grid = figure.subplots(len(spans), len(etas), sharey=True, squeeze=False)
    for line, span in zip(grid, spans, strict=True):
        for axes, eta in zip(line, etas, strict=True):
            rows = [row for row in found.rows if row.eta == eta]
            _bars(axes, rows, steady=span == "steady")
            batches = (
                f"batches {found.batches}–{found.steady_to}"
                if span == "steady"
                else f"first {found.batches} batches"
            )
            axes.set_title(f"η = {eta}, {batches}", loc="left", fontsize=10, color=INK)
            axes.axhline(found.limits[eta].smaller, color=QUIET, linewidth=1, linestyle=":")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=len(names), frameon=False, fontsize=8.5)
    figure.supxlabel(
        f"mean of {found.seeds} seeds, whiskers one standard deviation; dotted: upper limit; "
        "green: how many times faster roq is",
        fontsize=8.5, color=QUIET,
    )  # fmt: skip
    return _save(figure, path)


def _bars(axes: Axes, rows: list[Row], *, steady: bool) -> None:
    for x, row in enumerate(rows):
        shown = row.steady if steady and row.steady else row.cold
        speedup = row.steady_speedup if steady and row.steady_speedup else row.cold_speedup
        value = shown.throughput.mean
        ours = row.policy == "roq"
        axes.bar(
            x, value, yerr=shown.throughput.deviation, color=OURS if ours else THEIRS, width=0.72,
            error_kw={"ecolor": INK, "elinewidth": 0.9},
        )  # fmt: skip
        top = value
        for label, color, hatch, spread in (
            ("cut off in generation (L2)", ABORTED, "///", shown.aborted),
            ("finished, not trained (L3)", DROPPED, "\\\\\\", shown.dropped),
        ):
            if spread.mean > 0.5 or x == 0:
                axes.bar(
                    x, spread.mean, bottom=top, width=0.72, fill=False, edgecolor=color, hatch=hatch,
                    linewidth=0.8, label=label if x == 0 else None,
                )  # fmt: skip
            top += spread.mean
        axes.text(x, top + 40, f"{value:,.0f}", ha="center", fontsize=7.5, color=INK)
        if not ours:
            axes.text(
                x, value / 2, f"{speedup.mean:.2f}×", ha="center", fontsize=8, color=GREEN, fontweight="bold"
            )
    axes.set_xticks(
        range(len(rows)),
        [LABELS.get(row.policy, row.policy).replace(" ", "\n").replace("_", "_\n") for row in rows],
    )
    style(axes)
    axes.tick_params(axis="x", labelsize=6.5, colors=INK)
