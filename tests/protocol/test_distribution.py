"""What a bound on staleness does to the data: roq trains the lengths that were dispatched; a mechanism that
drops what is too old at training trains short ones.

One heavy-tailed run of each in virtual time, with the same lengths, engine places and trainer; roq's through
the real library.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import ks_2samp

from roq import Reservation, RunConfig, Scheduler
from tests.protocol.play import trajectory

ETA, BATCH, PLACES, STEPS = 1, 32, 64, 80
TRAIN_S = 0.3


def length(ordinal: int) -> float:
    """Seconds that a response takes: lognormal, the longest about 25 times the median."""
    return random.Random(ordinal).lognormvariate(0, 1.0)


class Outcome(NamedTuple):
    """Lengths in the order they were trained, how many prompts were dispatched, how many thrown away."""

    trained: list[float]
    dispatched: int
    dropped: int

    @property
    def p(self) -> float:
        """p-value of the two-sample Kolmogorov-Smirnov test of what was trained and what was dispatched."""
        return float(ks_2samp(self.trained, [length(i) for i in range(self.dispatched)]).pvalue)

    def __str__(self) -> str:
        quantiles = ", ".join(f"{q:.2f}" for q in np.quantile(self.trained, [0.5, 0.9, 0.99]))
        return (
            f"{len(self.trained)} of {self.dispatched} trained, {self.dropped} dropped, p = {self.p:.2g}, "
            f"mean {statistics.fmean(self.trained):.2f}, quantiles 50, 90, 99%: {quantiles}"
        )


def with_roq(sched: Scheduler) -> Outcome:
    """Through the real library."""
    sched.create(RunConfig(eta=ETA, batch_size=BATCH))
    now, version, trained = 0.0, 0, list[float]()
    running: list[tuple[float, int, Reservation]] = []
    trained_at: float | None = None
    while version < STEPS:
        for claim in sched.reserve("w", version, PLACES - len(running)).reservations:
            heapq.heappush(running, (now + length(claim.ordinal), claim.token, claim))
        if trained_at is None and (batch := sched.take("t")) is not None:
            trained += [length(group.ordinal) for group in batch.groups]
            trained_at = now + TRAIN_S
        if trained_at is not None and (not running or trained_at <= running[0][0]):
            now, trained_at, version = trained_at, None, version + 1
            sched.publish(version, "w", "t")
            sched.checkpointed(version, "t")
        else:
            now, _, claim = heapq.heappop(running)
            sched.complete(claim, trajectory(claim.v_traj))
    ledger = sched.status().ledger
    assert sched.verify() == []
    return Outcome(trained, ledger.issued, ledger.discarded + ledger.dead)


def dropping_at_training() -> Outcome:
    """Free capacity is filled at once, the oldest finished are trained, those beyond eta dropped."""
    now, version, ordinal, dropped, trained = 0.0, 0, 0, 0, list[float]()
    running: list[tuple[float, int, int]] = []
    finished: deque[tuple[int, int]] = deque()
    trained_at: float | None = None
    while version < STEPS:
        while len(running) < PLACES and len(finished) < (ETA + 1) * BATCH:
            heapq.heappush(running, (now + length(ordinal), ordinal, version))
            ordinal += 1
        if trained_at is None:
            fresh = [x for x in finished if version - x[1] <= ETA]
            dropped += len(finished) - len(fresh)
            finished = deque(fresh)
            if len(finished) >= BATCH:
                trained += [length(finished.popleft()[0]) for _ in range(BATCH)]
                trained_at = now + TRAIN_S
        if trained_at is not None and (not running or trained_at <= running[0][0]):
            now, trained_at, version = trained_at, None, version + 1
        elif running:
            now, done, began = heapq.heappop(running)
            finished.append((done, began))
    return Outcome(trained, ordinal, dropped)


def test_trained_lengths_are_those_that_were_dispatched(
    sched: Scheduler, record_property: Callable[[str, object], None]
) -> None:
    ours, theirs = with_roq(sched), dropping_at_training()
    for name, outcome in (("roq", ours), ("dropping at training", theirs)):
        print(f"{name}: {outcome}")
        record_property(name, str(outcome))
        assert len(outcome.trained) == STEPS * BATCH >= 2_000
    assert ours.dropped == 0
    assert ours.p > 0.05
    assert theirs.dropped > 100
    assert theirs.p < 1e-6
    assert statistics.fmean(theirs.trained) < 0.9 * statistics.fmean(ours.trained)


def test_the_test_can_tell() -> None:
    """The test detects the loss of the longest 5%, and passes without loss."""
    drawn = sorted(length(i) for i in range(STEPS * BATCH))
    assert Outcome(drawn, len(drawn) + PLACES, 0).p > 0.05
    assert Outcome(drawn[: int(len(drawn) * 0.95)], len(drawn), 0).p < 0.01
