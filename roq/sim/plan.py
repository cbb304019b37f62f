"""Sweep eta, concurrency, GPU split and over-sampling, and recommend a setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from roq.errors import ConfigError
from roq.sim.experiments import Figures, figures, mean_limits
from roq.sim.runs import Case, run_cases
from roq.sim.scenario import Limits, Scenario

__all__ = ["Option", "Plan", "Sweep", "plan"]

COLD = 10  # batches that are left out: the cold start
CLOSE = 0.01  # settings within this share of the best are as good


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to try, in every combination.

    Attributes:
        etas, places: maximum staleness; requests at once per instance.
        splits: (rollout instances, GPUs that train).
        slots: slots of a buffer beyond the batch size (batch over-sampling).
        candidates: candidates of a group beyond its size (group over-sampling).
    """

    etas: Sequence[int]
    places: Sequence[int]
    splits: Sequence[tuple[int, int]]
    slots: Sequence[int] = (0,)
    candidates: Sequence[int] = (0,)

    def scenarios(self, base: Scenario) -> list[Scenario]:
        """The scenarios, in order."""
        return [
            msgspec.structs.replace(
                base,
                eta=eta,
                places=places,
                instances=instances,
                trainer_gpus=gpus,
                buffer_slots=base.batch_size + slots,
                group_candidates=base.group_size + candidates,
            )
            for (instances, gpus), slots, candidates, eta, places in product(
                self.splits, self.slots, self.candidates, self.etas, self.places
            )
        ]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and its steady state; ``refused`` says why it cannot run, and then there are no figures."""

    eta: int
    places: int
    instances: int
    trainer_gpus: int
    slots: int
    candidates: int
    figures: Figures | None = None
    limits: Limits | None = None
    refused: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, and the one to run with the reason."""

    assumed: str
    seeds: int
    batches: int
    options: list[Option]
    recommended: int
    reason: str


def plan(
    base: Scenario, sweep: Sweep, seeds: int, processes: int, tick: Callable[[Case], None] = lambda _: None
) -> Plan:
    """Simulate every setting under roq and recommend one.

    Within :data:`CLOSE` of the best effective throughput, what discards nothing is preferred, then the lowest
    mean staleness, then the fewest requests at once.

    Raises:
        ConfigError: no setting can run.
    """
    scenarios = sweep.scenarios(base)
    refused: dict[int, str] = {}
    cases: list[Case] = []
    for number, scenario in enumerate(scenarios):
        try:
            scenario.checked().suits(scenario.workload(0))
        except ConfigError as error:
            refused[number] = str(error)
            continue
        cases += [Case(scenario, "roq", seed) for seed in range(seeds)]
    if not cases:
        raise ConfigError(f"no setting can run: {refused[0]}")
    outcomes = dict(zip(cases, run_cases(cases, processes, tick), strict=True))
    options: list[Option] = []
    for number, scenario in enumerate(scenarios):
        runs = [outcomes[Case(scenario, "roq", s)] for s in range(seeds)] if number not in refused else []
        options.append(
            Option(
                eta=scenario.eta,
                places=scenario.places,
                instances=scenario.instances,
                trainer_gpus=scenario.trainer_gpus,
                slots=scenario.buffer_slots or scenario.batch_size,
                candidates=scenario.candidates,
                figures=figures(runs, min(COLD, base.batches - 1)) if runs else None,
                limits=mean_limits(runs) if runs else None,
                refused=refused.get(number),
            )
        )
    chosen, reason = recommend(options)
    return Plan(
        assumed=next(iter(outcomes.values())).assumed,
        seeds=seeds,
        batches=base.batches,
        options=options,
        recommended=chosen,
        reason=reason,
    )


def recommend(options: Sequence[Option]) -> tuple[int, str]:
    """The setting to run (its place in ``options``) and why."""
    able = [(number, o.figures, o) for number, o in enumerate(options) if o.figures is not None]
    best = max(figures.throughput.mean for _, figures, _ in able)
    close = [entry for entry in able if entry[1].throughput.mean >= (1 - CLOSE) * best]

    def merit(entry: tuple[int, Figures, Option]) -> tuple[float, ...]:
        _, figures, option = entry
        lost = round((figures.aborted.mean + figures.dropped.mean) / best, 2)
        return lost, round(figures.staleness_mean, 2), option.places, -figures.throughput.mean

    number, figures, option = min(close, key=merit)
    reasons = [
        f"{figures.throughput.mean:,.0f} tokens/s, "
        + ("the best" if figures.throughput.mean == best else f"within {CLOSE:.0%} of the best ({best:,.0f})")
    ]
    if len(close) > 1:
        reasons.append(
            f"of the {len(close)} settings that close it is the freshest (mean staleness "
            f"{figures.staleness_mean:.2f}, at most {figures.staleness_max})"
        )
    fewer = [f for _, f, o in able if _same_but(o, option, eta=option.eta - 1)]
    if fewer:
        loss = 1 - fewer[0].throughput.mean / figures.throughput.mean
        reasons.append(f"η = {option.eta - 1} would change the throughput by {-loss:+.1%}")
    if option.limits is not None:
        if option.limits.rollout < option.limits.trainer:
            reasons.append(
                f"rollout is the bottleneck: the trainer is idle {figures.trainer_idle:.0%} of the time, so "
                "GPUs would do more for rollout than for training"
            )
        else:
            reasons.append(
                f"training is the bottleneck: {max(0.0, figures.rollout_idle):.0%} of the places are empty, "
                "so GPUs would do more for training than for rollout"
            )
    return number, "; ".join(reasons)


def _same_but(other: Option, option: Option, eta: int) -> bool:
    """Whether ``other`` is ``option`` with this eta."""
    fields = ("places", "instances", "trainer_gpus", "slots", "candidates")
    return other.eta == eta and all(getattr(other, f) == getattr(option, f) for f in fields)
