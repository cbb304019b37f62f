"""The timeline of a run, from its events: steps, waste, and who waited how long and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from roq.config import RunConfig
from roq.events.event import Event
from roq.events.history import FATES, Batch, GroupHistory
from roq.events.replay import Replay

__all__ = [
    "Span",
    "Timeline",
    "WaitShares",
    "bins",
    "cause",
    "overlap",
    "timeline_of",
    "verdict",
    "wait_shares",
]

Span = tuple[float, float]
MUCH = 0.2  # a side that waits for this share of its time counts as waiting
NOTABLE = 0.1  # a cause of at least this share of a wait is reported


class _Spans:
    """Time spans by key, opened and closed as events arrive."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        self._since: dict[str, float] = {}

    def begin(self, name: str, time: float) -> None:
        self._since.setdefault(name, time)

    def end(self, name: str, time: float) -> None:
        if (since := self._since.pop(name, time)) < time:
            self.spans.setdefault(name, []).append((since, time))

    def close(self, time: float) -> None:
        for name in list(self._since):
            self.end(name, time)


class Timeline(Replay):
    """The timeline of a run; see :func:`timeline_of`.

    Attributes:
        steps: the batches, in order.
        attached: when each worker was attached. idle: when each had nothing in flight.
        generated: tokens that the engines generated, including unfinished ones; None if unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Batch] = []
        self._attached, self._idle, self._pauses = _Spans(), _Spans(), _Spans()
        self.attached, self.idle = self._attached.spans, self._idle.spans
        self._reserved: float | None = None
        self.generated: int | None = None

    @property
    def eta(self) -> int:
        """The maximum staleness; without a configuration, the most that a group was reserved ahead."""
        return self.ahead if self.config is None else self.config.eta

    @property
    def at_work(self) -> float:
        """When the first trajectory was issued."""
        return self.began if self._reserved is None else self._reserved

    @property
    def pauses(self) -> list[Span]:
        """When admission was paused."""
        return self._pauses.spans.get("run", [])

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the last."""
        return self.time - self.began

    @property
    def work_s(self) -> float:
        """Seconds from the first trajectory issued to the last event."""
        return self.time - self.at_work

    @property
    def waits(self) -> list[Span]:
        """When the trainer waited for a batch."""
        spans = [(s.waited_from, s.taken) for s in self.steps if s.waited_from is not None]
        last = self.steps[-1].published if self.steps else None
        return spans if last is None or self.ended else [*spans, (last, self.time)]

    def tokens(self) -> dict[str, int]:
        """Return finished response tokens by their group's fate; ``open``: the group is still in the run."""
        found: Counter[str] = Counter()
        for group in self.groups.values():
            known = group.state if group.state in ("trained", *FATES) else "open"
            found[known] += group.tokens
        return dict(found)

    def idle_share(self, span: Span) -> float | None:
        """Return the share of ``span`` that the workers had nothing in flight; None without workers."""
        there = sum(overlap(spans, span) for spans in self.attached.values())
        return sum(overlap(spans, span) for spans in self.idle.values()) / there if there > 0 else None

    def on_worker_joined(self, worker: str) -> None:
        """Begin the worker's spans."""
        self._attached.begin(worker, self.time)
        self._idle.begin(worker, self.time)

    def on_worker_left(self, worker: str) -> None:
        """End the worker's spans."""
        self._attached.end(worker, self.time)
        self._idle.end(worker, self.time)

    def on_busy(self, worker: str) -> None:
        """End an idle span."""
        self._idle.end(worker, self.time)

    def on_idle(self, worker: str) -> None:
        """Begin an idle span."""
        self._idle.begin(worker, self.time)

    def on_reserved(self, group: GroupHistory, worker: str) -> None:  # noqa: ARG002
        """Record the start of the work."""
        if self._reserved is None:
            self._reserved = self.time

    def on_taken(self, batch: Batch) -> None:
        """Record a step."""
        self.steps.append(batch)

    def on_returned(self, batch: Batch) -> None:
        """Forget a step that will be taken again."""
        self.steps = [step for step in self.steps if step is not batch]

    def on_paused(self, paused: bool) -> None:
        """Begin or end a pause."""
        (self._pauses.begin if paused else self._pauses.end)("run", self.time)

    def close(self) -> None:
        """End all open spans at the newest event."""
        for spans in (self._attached, self._idle, self._pauses):
            spans.close(self.time)


def overlap(spans: Iterable[Span], span: Span) -> float:
    """Return the seconds of ``span`` covered by ``spans``, which must not overlap each other.

    >>> overlap([(0.0, 2.0), (3.0, 9.0)], (1.0, 4.0))
    2.0
    """
    return sum(max(0.0, min(end, span[1]) - max(start, span[0])) for start, end in spans)


def timeline_of(events: Iterable[Event], config: RunConfig | None = None, run: str = "") -> Timeline:
    """Build the timeline of a run's events; ``config`` and ``run`` default to those in an archive."""
    timeline = Timeline()
    for event in events:
        timeline.apply(event)
    timeline.close()
    timeline.config, timeline.run = config or timeline.config, run or timeline.run
    return timeline


# ---- causes --------------------------------------------------------------------------------------


def cause(timeline: Timeline, step: Batch) -> str:
    """Explain why the trainer waited for a batch."""
    assert step.waited_from is not None
    span = (step.waited_from, step.taken)
    said: list[str] = []
    gaps = _without(timeline.attached.values(), span)
    if gaps > NOTABLE * step.wait_s:
        said.append(f"no worker was attached for {gaps:.1f} s")
    if gaps < (starting := min(timeline.at_work, span[1]) - span[0]) and starting > NOTABLE * step.wait_s:
        said.append(f"no trajectory had been issued for {starting:.1f} s: engines were starting")
    if (paused := overlap(timeline.pauses, span)) > NOTABLE * step.wait_s:
        said.append(f"admission was paused for {paused:.1f} s")
    if (last := step.last) is not None and last.occupied is not None:
        said.append(_of_the_last(step, last, span))
    return "; ".join(said) or "unknown: the events of its groups are missing"


def _without(attached: Iterable[list[Span]], span: Span) -> float:
    """Return the seconds of ``span`` without any attached worker."""
    covered, at = 0.0, span[0]
    for start, end in sorted(s for spans in attached for s in spans):
        start, end = max(start, at), min(end, span[1])
        if end > start:
            covered, at = covered + end - start, end
    return span[1] - span[0] - covered


def _of_the_last(step: Batch, last: GroupHistory, span: Span) -> str:
    slowest = max(last.members.items(), key=lambda item: item[1].completed or 0.0, default=None)
    text = f"its last group was {last.group} (prompt {last.ordinal})"
    if last.reserved > span[0] + NOTABLE * step.wait_s:
        text += f", reserved {last.reserved - span[0]:.1f} s into the wait"
    if slowest is not None:
        number, member = slowest
        if member.completed is not None and member.issued is not None:
            took = member.completed - member.issued
            text += f"; member {number} took {member.worker} {took:.1f} s for {member.tokens:,} tokens"
        if member.attempts > 1:
            text += f", in attempt {member.attempts}"
    if last.occupied and last.finished and last.occupied - last.finished > NOTABLE * step.wait_s:
        text += f"; its post-processing took {last.occupied - last.finished:.1f} s"
    others = sorted(g.occupied for g in step.groups if g.occupied is not None)[:-1]
    alone = (last.occupied or 0.0) - max([span[0], *others[-1:]])
    if alone > 0.5 * step.wait_s:
        text += f"; for {alone:.1f} s it was the only one missing"
    return text


class WaitShares(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting from the first published weights to the last, which excludes startup and shutdown.

    Attributes:
        trainer_s: seconds the trainer waited for a batch.
        trainer: share of its time, 0 to 1.
        workers: share of the workers' time with nothing in flight; None if no worker is known.
    """

    trainer_s: float
    trainer: float
    workers: float | None


def _later(timeline: Timeline) -> list[Batch]:
    return [step for step in timeline.steps[1:] if step.published is not None]


def wait_shares(timeline: Timeline) -> WaitShares | None:
    """Compute the waiting shares, the same for all readers; None if fewer than three batches were trained."""
    steps = _later(timeline)
    if len(steps) < 2:
        return None
    wait, train = sum(step.wait_s for step in steps), sum(step.train_s or 0.0 for step in steps)
    began = steps[0].taken if steps[0].waited_from is None else steps[0].waited_from
    return WaitShares(
        trainer_s=round(wait, 3),
        trainer=wait / (wait + train) if wait + train else 0.0,
        workers=timeline.idle_share((began, steps[-1].published or timeline.time)),
    )


def verdict(timeline: Timeline) -> str:
    """Name the run's bottleneck, with the numbers."""
    found = wait_shares(timeline)
    if found is None:
        return "Too few steps to find this run's bottleneck."
    wait, waits, idle = found.trainer_s, found.trainer, found.workers or 0.0
    alone = sum(_alone(step) for step in _later(timeline))
    facts = f"the trainer waited {waits:.0%} of the time, the workers were idle {idle:.0%} of the time"
    tail = ""
    if wait and alone > 0.4 * wait:
        tail = f" {alone / wait:.0%} of that wait was for only the last group of a batch: responses are long."
    if waits >= MUCH and idle >= MUCH:
        return (
            f"Each side waits for the other: {facts}.{tail} To keep both busy, raise η or have more than "
            "one batch of trajectories in flight."
        )
    if waits >= MUCH:
        return f"Generation limits this run: {facts}.{tail} Add workers or use faster ones."
    if idle >= MUCH:
        return f"Training limits this run: {facts}. Use fewer workers or a faster trainer."
    return f"Both sides are busy: {facts}."


def _alone(step: Batch) -> float:
    """Return the seconds of a wait in which only one group was missing."""
    known = sorted(group.occupied for group in step.groups if group.occupied is not None)
    if len(known) < 2 or step.waited_from is None:
        return 0.0
    return max(0.0, min(known[-1], step.taken) - max(known[-2], step.waited_from))


def bins(timeline: Timeline, count: int) -> list[Span]:
    """Divide the run's working time into ``count`` equal spans."""
    edges = [timeline.at_work + timeline.work_s * i / count for i in range(count + 1)]
    return list(pairwise(edges))
