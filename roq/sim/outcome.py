"""The outcome of a simulated run, update by update."""

from __future__ import annotations

from statistics import fmean

import msgspec

from roq.sim.scenario import Limits

__all__ = ["Outcome", "Span", "Update"]


class Update(msgspec.Struct, kw_only=True):
    """One update. Times in virtual seconds; token counts are response tokens.

    Attributes:
        version: of the weights that are trained, from 0.
        wait_s: how long the trainer waited for the batch.
        avoidable_s: the part of it in which some legal placement of what was complete would have made the
            batch READY (roq only).
        published: when the new weights counted.
        tokens: in the batch.
        aborted_tokens, dropped_tokens: thrown away since the update before: cut off in generation (L2),
            finished but not trained (L3).
        staleness: trajectories of the batch by their group's staleness.
        place_s: places in use, integrated over time, of all instances, since the start.
    """

    version: int
    wait_s: float = 0.0
    avoidable_s: float = 0.0
    published: float = 0.0
    tokens: float = 0.0
    aborted_tokens: float = 0.0
    dropped_tokens: float = 0.0
    staleness: dict[int, int] = {}
    place_s: float = 0.0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over some updates of a run.

    Attributes:
        seconds: virtual time of the span.
        throughput: response tokens trained a second (effective throughput).
        aborted, dropped: response tokens thrown away a second, cut off in generation (L2) or finished (L3).
        trainer_idle: share of the time that the trainer waited for a batch.
        rollout_idle: share of the places that were empty.
        staleness_mean, staleness_max: of the trained trajectories' groups.
        avoidable: share of the time that the trainer waited although a legal placement had a batch.
    """

    seconds: float
    throughput: float
    aborted: float
    dropped: float
    trainer_idle: float
    rollout_idle: float
    staleness_mean: float
    staleness_max: int
    avoidable: float


class Outcome(msgspec.Struct, kw_only=True):
    """A simulated run.

    ``groups`` counts every admitted group once, by what became of it: trained, waiting, running, discarded.
    ``limits`` are the upper limits for this run's lengths; ``assumed`` says what those are.
    """

    policy: str
    eta: int
    seed: int
    places: int
    updates: list[Update]
    groups: dict[str, int]
    limits: Limits
    assumed: str
    generated_tokens: float = 0.0
    unfinished_tokens: float = 0.0
    waiting_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    stalled: float = 0.0
    preempted: int = 0

    @property
    def seconds(self) -> float:
        """Virtual time of the whole run."""
        return self.updates[-1].published

    def span(self, first: int = 0, end: int | None = None) -> Span:
        """Figures of the updates ``first`` to ``end - 1``: their time begins where the one before ended."""
        updates = self.updates[first:end]
        begun = self.updates[first - 1] if first else Update(version=-1)
        seconds = updates[-1].published - begun.published
        counts: dict[int, int] = {}
        for update in updates:
            for staleness, count in update.staleness.items():
                counts[staleness] = counts.get(staleness, 0) + count

        def rate(values: list[float]) -> float:
            return sum(values) / seconds

        return Span(
            seconds=seconds,
            throughput=rate([update.tokens for update in updates]),
            aborted=rate([update.aborted_tokens for update in updates]),
            dropped=rate([update.dropped_tokens for update in updates]),
            trainer_idle=rate([update.wait_s for update in updates]),
            rollout_idle=1 - rate([updates[-1].place_s - begun.place_s]) / self.places,
            staleness_mean=fmean([s for s, n in counts.items() for _ in range(n)]),
            staleness_max=max(counts),
            avoidable=rate([update.avoidable_s for update in updates]),
        )
