"""The results as tables for a terminal."""

from __future__ import annotations

import msgspec
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from roq.sim.calibrate import Fit
from roq.sim.experiments import ARTICLE, Comparison, Figures, Row, Spread, Staleness
from roq.sim.plan import Plan
from roq.sim.scenario import Limits

__all__ = ["LABELS", "comparison_tables", "fit_table", "limits_line", "plan_table", "staleness_table"]

LABELS = {
    "roq": "roq",
    "nemo-in-order": "NeMo-RL in_order",
    "nemo-weight-fifo": "NeMo-RL weight_fifo",
    "verl-drop": "verl drop",
    "trl": "TRL",
    "roll": "ROLL",
    "roll-evict": "ROLL, evicting",
}


def limits_line(limits: Limits, share: float) -> str:
    """The upper limits in words."""
    return (
        f"upper limits: rollout {limits.rollout:,.0f} tokens/s with every place in use, "
        f"trainer {limits.trainer:,.0f}; roq reaches {share:.1%} of the smaller"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def staleness_table(found: Staleness) -> RenderableType:
    """Experiment 1."""
    table = _table(
        f"batches by staleness ({_seeds(found.seeds)})",
        "η", "batches", f"all of {found.size}", "none above η", "mean", "max", "tokens/s",
        "rollout limit", "trainer limit", "of the smaller", "avoidable wait: steps", "time",
    )  # fmt: skip
    for row in found.rows:
        shown = row.figures
        table.add_row(
            str(row.eta), f"{row.batches}", f"{row.full}", f"{row.within}", f"{shown.staleness_mean:.2f}",
            f"{shown.staleness_max}", str(shown.throughput), f"{row.limits.rollout:,.0f}",
            f"{row.limits.trainer:,.0f}", f"{shown.limit_share:.1%}",
            f"{row.avoidable_steps / row.batches:.2%}", f"{shown.avoidable:.4%}",
        )  # fmt: skip
    return Stack(table, f"assumed: {found.assumed}")


def comparison_tables(found: Comparison, *, with_article: bool) -> RenderableType:
    """Experiment 2: one table for each eta."""
    parts: list[RenderableType] = []
    cold = f"first {found.batches}"
    steady = f"{found.batches}–{found.steady_to}"
    for eta, limits in found.limits.items():
        rows = [row for row in found.rows if row.eta == eta]
        table = _table(
            f"η = {eta}: effective throughput, tokens/s ({_seeds(found.seeds)}, ± one standard deviation)",
            "mechanism", cold, "roq is", *(["article"] if with_article else []),
            *([steady, "roq is"] if rows[0].steady else []),
            "L2", "L3", "trainer idle", "places empty", "staleness", "max", "of limit",
        )  # fmt: skip
        for row in rows:
            table.add_row(*_cells(row, eta, with_article=with_article))
        parts.append(table)
        best = next((row for row in rows if row.policy == "roq"), rows[0])
        parts.append(limits_line(limits, (best.steady or best.cold).limit_share) + "\n")
    parts.append("L2, L3: tokens/s thrown away in generation, and finished; these columns and the next are")
    parts.append(f"of batches {steady if found.steady_to > found.batches else cold}")
    parts.append(f"assumed: {found.assumed}")
    return Stack(*parts)


def plan_table(found: Plan) -> RenderableType:
    """Every setting of a plan, the recommended one marked."""
    table = _table(
        f"settings ({_seeds(found.seeds)}, batches from {min(10, found.batches - 1)} to {found.batches})",
        "", "η", "places", "instances", "trainer GPUs", "slots", "candidates", "tokens/s", "rollout limit",
        "trainer limit", "of limit", "trainer idle", "places empty", "staleness", "max", "thrown away",
    )  # fmt: skip
    for number, option in enumerate(found.options):
        setting = [
            "→" if number == found.recommended else "", option.eta, option.places, option.instances,
            option.trainer_gpus, option.slots, option.candidates,
        ]  # fmt: skip
        cells = [str(value) for value in setting]
        shown, limits = option.figures, option.limits
        if shown is None or limits is None:
            table.add_row(*cells, "cannot run")
            continue
        thrown = shown.aborted.mean + shown.dropped.mean
        table.add_row(
            *cells, str(shown.throughput), f"{limits.rollout:,.0f}", f"{limits.trainer:,.0f}",
            f"{shown.limit_share:.0%}", f"{shown.trainer_idle:.0%}", f"{max(0.0, shown.rollout_idle):.0%}",
            f"{shown.staleness_mean:.2f}", f"{shown.staleness_max}", f"{thrown:,.0f}",
        )  # fmt: skip
    parts: list[RenderableType] = [table]
    parts += [f"cannot run: {why}" for why in sorted({o.refused for o in found.options if o.refused})]
    best = found.options[found.recommended]
    return Stack(
        *parts,
        f"assumed: {found.assumed}",
        f"\nrecommended: η = {best.eta}, {best.places} places on each of {best.instances} instances, "
        f"{best.trainer_gpus} GPUs for training, {best.slots} slots, {best.candidates} candidates",
        f"because: {found.reason}",
    )


def fit_table(fit: Fit) -> RenderableType:
    """A fitted cost model and its check."""
    table = _table(f"cost model {fit.cost.name}", "coefficient", "value")
    for title, part in (("rollout", fit.cost.rollout), ("trainer", fit.cost.trainer)):
        values: dict[str, float] = msgspec.structs.asdict(part)
        for key, value in values.items():
            table.add_row(f"{title}.{key}", f"{value:.4g}")
    return Stack(
        table,
        f"fitted to {fit.responses:,} responses (mean error {fit.rollout_error:.0%} of the mean time) and "
        f"{fit.updates} updates ({fit.train_error:.0%})",
        f"the run: η = {fit.eta}, {fit.batch_size} groups of {fit.group_size}, {fit.instances} workers with "
        f"at most {fit.places} at once",
        f"check: the run took {fit.real_s:.1f} s from its first update to its last, its simulation "
        f"{fit.simulated_s:.1f} s ({fit.simulated_s / fit.real_s - 1:+.1%})",
    )


def _cells(row: Row, eta: int, *, with_article: bool) -> list[str]:
    shown: Figures = row.steady or row.cold
    cells = [LABELS.get(row.policy, row.policy), str(row.cold.throughput), _times(row, row.cold_speedup)]
    if with_article:
        cells.append(ARTICLE.get(row.policy, {}).get(eta, ""))
    if row.steady is not None and row.steady_speedup is not None:
        cells += [str(row.steady.throughput), _times(row, row.steady_speedup)]
    return [
        *cells,
        f"{shown.aborted.mean:,.0f}",
        f"{shown.dropped.mean:,.0f}",
        f"{shown.trainer_idle:.0%}",
        f"{max(0.0, shown.rollout_idle):.0%}",
        f"{shown.staleness_mean:.2f}",
        f"{shown.staleness_max}",
        f"{shown.limit_share:.0%}",
    ]


def _times(row: Row, speedup: Spread) -> str:
    return "" if row.policy == "roq" else f"{speedup.mean:.2f}×"
