"""The article's two experiments and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import msgspec

from roq.sim.outcome import Outcome, Span
from roq.sim.policies import policy_names
from roq.sim.runs import Case, run_cases
from roq.sim.scenario import Limits, Scenario

__all__ = [
    "ARTICLE",
    "Comparison",
    "Figures",
    "Row",
    "Spread",
    "Staleness",
    "StalenessRow",
    "compare",
    "figures",
    "staleness",
]

Tick = Callable[[Case], None]

# Effective throughput in the article, tokens/s: a figure, or the range that its ratios give.
_ROQ = {1: 1929, 2: 2007, 3: 2056}
ARTICLE: dict[str, dict[int, str]] = {
    "roq": {eta: f"{value:,}" for eta, value in _ROQ.items()},
    "nemo-in-order": {eta: f"{v / 1.14:,.0f}–{v / 1.11:,.0f}" for eta, v in _ROQ.items()},
    "nemo-weight-fifo": {eta: f"{v / 1.17:,.0f}–{v / 1.06:,.0f}" for eta, v in _ROQ.items()},
    "verl-drop": {1: "1,438", 2: f"{2007 / 1.10:,.0f}", 3: f"{2056 / 1.05:,.0f}"},
    "trl": {1: "1,612"} | {eta: f"{_ROQ[eta] / 1.36:,.0f}–{_ROQ[eta] / 1.20:,.0f}" for eta in (2, 3)},
    "roll-evict": {1: "1,512"} | {eta: f"{_ROQ[eta] / 1.33:,.0f}–{_ROQ[eta] / 1.28:,.0f}" for eta in (2, 3)},
}


class Spread(msgspec.Struct, frozen=True):
    """Mean and sample standard deviation over seeds."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of some values; one value has no deviation."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:,.0f} ± {self.deviation:,.0f}"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A :class:`~roq.sim.outcome.Span` over several seeds; staleness_max is the greatest of all."""

    throughput: Spread
    aborted: Spread
    dropped: Spread
    trainer_idle: float
    rollout_idle: float
    staleness_mean: float
    staleness_max: int
    avoidable: float
    limit_share: float


def figures(outcomes: Sequence[Outcome], first: int = 0, end: int | None = None) -> Figures:
    """Figures of the updates ``first`` to ``end - 1`` of runs that differ in their seed."""
    spans: list[Span] = [outcome.span(first, end) for outcome in outcomes]
    return Figures(
        throughput=Spread.of([span.throughput for span in spans]),
        aborted=Spread.of([span.aborted for span in spans]),
        dropped=Spread.of([span.dropped for span in spans]),
        trainer_idle=fmean([span.trainer_idle for span in spans]),
        rollout_idle=fmean([span.rollout_idle for span in spans]),
        staleness_mean=fmean([span.staleness_mean for span in spans]),
        staleness_max=max(span.staleness_max for span in spans),
        avoidable=fmean([span.avoidable for span in spans]),
        limit_share=fmean([s.throughput / o.limits.smaller for s, o in zip(spans, outcomes, strict=True)]),
    )


def mean_limits(outcomes: Sequence[Outcome]) -> Limits:
    """The upper limits, mean over the seeds' lengths."""
    return Limits(
        rollout=fmean([outcome.limits.rollout for outcome in outcomes]),
        trainer=fmean([outcome.limits.trainer for outcome in outcomes]),
    )


# ---- experiment 1 ------------------------------------------------------------------------------


class StalenessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One eta. ``avoidable_steps`` counts updates that had any avoidable wait, ``first`` is seed 0's run."""

    eta: int
    batches: int
    full: int
    within: int
    avoidable_steps: int
    figures: Figures
    limits: Limits
    trajectories: dict[int, int]
    first: Outcome


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Experiment 1: batches by staleness."""

    assumed: str
    size: int
    seeds: int
    rows: list[StalenessRow]


def staleness(
    scenario: Scenario, etas: Sequence[int], seeds: int, processes: int, tick: Tick = lambda _: None
) -> Staleness:
    """roq alone, ``scenario.batches`` batches for each eta and seed."""
    cases = [
        Case(msgspec.structs.replace(scenario, eta=eta), "roq", seed) for eta in etas for seed in range(seeds)
    ]
    outcomes = run_cases(cases, processes, tick)
    size = scenario.batch_size * scenario.group_size
    rows: list[StalenessRow] = []
    for eta in etas:
        runs = [outcome for outcome in outcomes if outcome.eta == eta]
        updates = [update for run in runs for update in run.updates]
        counts: dict[int, int] = {}
        for update in updates:
            for value, count in update.staleness.items():
                counts[value] = counts.get(value, 0) + count
        rows.append(
            StalenessRow(
                eta=eta,
                batches=len(updates),
                full=sum(sum(update.staleness.values()) == size for update in updates),
                within=sum(max(update.staleness) <= eta for update in updates),
                avoidable_steps=sum(update.avoidable_s > 0 for update in updates),
                figures=figures(runs),
                limits=mean_limits(runs),
                trajectories=dict(sorted(counts.items())),
                first=runs[0],
            )
        )
    return Staleness(assumed=outcomes[0].assumed, size=size, seeds=seeds, rows=rows)


# ---- experiment 2 ------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one eta: from the cold start, and in steady state. ``speedup`` is roq's over it,
    seed by seed."""

    policy: str
    eta: int
    cold: Figures
    cold_speedup: Spread
    steady: Figures | None
    steady_speedup: Spread | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Experiment 2: effective throughput at equal maximum staleness."""

    assumed: str
    seeds: int
    batches: int
    steady_to: int
    rows: list[Row]
    limits: dict[int, Limits]


def compare(
    scenario: Scenario,
    etas: Sequence[int],
    seeds: int,
    steady_to: int,
    processes: int,
    tick: Tick = lambda _: None,
    policies: Sequence[str] | None = None,
) -> Comparison:
    """All policies: ``scenario.batches`` batches from a cold start, then on to ``steady_to``."""
    names = list(policies or policy_names())
    cold_end = scenario.batches
    last = max(cold_end, steady_to)
    cases = [
        Case(msgspec.structs.replace(scenario, eta=eta, batches=last), name, seed)
        for eta in etas
        for name in names
        for seed in range(seeds)
    ]
    outcomes = run_cases(cases, processes, tick)
    rows: list[Row] = []
    bounds: dict[int, Limits] = {}
    for eta in etas:
        runs = {name: [o for o in outcomes if (o.policy, o.eta) == (name, eta)] for name in names}
        ours = runs.get("roq", runs[names[0]])
        bounds[eta] = mean_limits(ours)
        for name in names:
            steady = last > cold_end
            rows.append(
                Row(
                    policy=name,
                    eta=eta,
                    cold=figures(runs[name], 0, cold_end),
                    cold_speedup=_speedup(ours, runs[name], 0, cold_end),
                    steady=figures(runs[name], cold_end) if steady else None,
                    steady_speedup=_speedup(ours, runs[name], cold_end, None) if steady else None,
                )
            )
    return Comparison(
        assumed=outcomes[0].assumed,
        seeds=seeds,
        batches=cold_end,
        steady_to=last,
        rows=rows,
        limits=bounds,
    )


def _speedup(ours: Sequence[Outcome], theirs: Sequence[Outcome], first: int, end: int | None) -> Spread:
    return Spread.of(
        [
            a.span(first, end).throughput / b.span(first, end).throughput
            for a, b in zip(ours, theirs, strict=True)
        ]
    )
