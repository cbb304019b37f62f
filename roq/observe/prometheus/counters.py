"""The counters and histograms of ``roq metrics`` that count events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from roq.events.event import Event
from roq.events.history import FATES, Batch, Fate, GroupHistory, MemberHistory
from roq.events.replay import Reopened, Replay
from roq.observe.prometheus.metrics import HELP

__all__ = ["EventCounters", "counter", "histogram"]

REASONS = ("zero_variance", "surplus", "stuck_timeout", "other")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
TOKENS = tuple(2**n for n in range(4, 18))
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def counter(registry: CollectorRegistry, run: str, name: str, **labels: Sequence[str]) -> Any:
    """Create a counter with these labels. With one label, each value starts at 0."""
    made = Counter(name, HELP[name], ("run", *labels), registry=registry)
    if not labels:
        return made.labels(run)
    if len(labels) == 1:
        for value in next(iter(labels.values())):
            made.labels(run, value)
    return made


def histogram(registry: CollectorRegistry, run: str, name: str, buckets: Sequence[float] = SECONDS) -> Any:
    """Create a histogram."""
    return Histogram(name, HELP[name], ("run",), buckets=buckets, registry=registry).labels(run)


class EventCounters(Replay):
    """Counts events applied while :attr:`counting`; keeps only the groups that are in the run."""

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        super().__init__()
        self.counting = False
        self._label = run
        about = (registry, run)
        self._events = counter(*about, "roq_events_total", event=(*self.HANDLERS, "other"))
        self._missed = counter(*about, "roq_missed_events_total")
        self._moves = counter(*about, "roq_moves_total")
        self._releases = counter(
            *about, "roq_releases_total", reason=("error", "detach", "left", "lease_expired")
        )
        self._removed = counter(*about, "roq_removed_groups_total", fate=FATES, reason=REASONS)
        self._removed_tokens = counter(*about, "roq_removed_tokens_total", fate=FATES)
        self._trained_tokens = counter(*about, "roq_trained_tokens_total")
        self._staleness = histogram(*about, "roq_staleness_versions", VERSIONS)
        self._queue_wait = histogram(*about, "roq_queue_wait_seconds")
        self._rollout = histogram(*about, "roq_rollout_seconds")
        self._response = histogram(*about, "roq_response_tokens", TOKENS)
        self._train = histogram(*about, "roq_train_seconds")
        self._trainer_wait = histogram(*about, "roq_trainer_wait_seconds")

    def apply(self, event: Event) -> None:
        """Apply the next event, and count it."""
        if self.counting:
            name = event.name if event.name in self.HANDLERS else "other"  # from a newer library
            self._events.labels(self._label, name).inc()
            self._moves.inc(len(event.moves))
        super().apply(event)

    def on_gap(self, missing: int | None) -> None:
        """Forget all groups: some may have left during the gap."""
        self.forget(list(self.groups.values()))
        if self.counting:
            self._missed.inc(missing or 0)

    def on_completed(self, group: GroupHistory | None, number: int, member: MemberHistory) -> None:  # noqa: ARG002
        """Count a trajectory."""
        if self.counting:
            self._response.observe(member.tokens)
            if member.issued is not None:
                self._rollout.observe(self.time - member.issued)

    def on_reopened(self, why: Reopened) -> None:
        """Count a claim that was released or lost."""
        if self.counting:
            self._releases.labels(self._label, why).inc()

    def on_removed(self, group: GroupHistory | None, fate: Fate, reason: str) -> None:
        """Count a group that left untrained."""
        if self.counting:
            reason = reason if reason in REASONS else "other"
            self._removed.labels(self._label, fate, reason).inc()
            self._removed_tokens.labels(self._label, fate).inc(0 if group is None else group.tokens)
        if group is not None:
            self.forget([group])

    def on_taken(self, batch: Batch) -> None:
        """Count a batch and its groups."""
        if not self.counting:
            return
        if batch.waited_from is not None and batch.version > 0:  # exclude the engines' startup
            self._trainer_wait.observe(batch.wait_s)
        for group in batch.groups:
            self._staleness.observe(batch.version - group.v_traj)
            self._trained_tokens.inc(group.tokens)
            if group.occupied is not None:
                self._queue_wait.observe(self.time - group.occupied)

    def on_published(self, batch: Batch | None) -> None:
        """Count a step."""
        if batch is not None:
            self.forget(batch.groups)
            if self.counting:
                self._train.observe(batch.train_s)
