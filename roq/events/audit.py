"""Audit a run: replay its events and compare the result with the state in Redis.

Every ordinal must be issued once and accounted for once, every trained group must be within the staleness
bound, and the moves must lead to the current slots. The events must be complete: to audit a run, set
``event_log`` larger than its number of events, or archive them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from roq.events.event import Event
from roq.events.history import Batch, GroupHistory
from roq.events.replay import Replay
from roq.protocol.snapshot import Snapshot

__all__ = ["Audit", "audit_events"]


class Audit(msgspec.Struct):
    """The result of an audit.

    Attributes:
        events: number of events replayed.
        issued: number of ordinals issued.
        fates: number of ordinals that are trained, in_slots, requeued, filtered, discarded, dead.
        staleness: taken groups by staleness.
        reissued, expired, released: claims issued again, lost with an expired lease, and given back.
        unknown: events that this version does not know, by name; a newer library may have written them.
        problems: one sentence per contradiction; empty if the audit passed.
    """

    events: int = 0
    issued: int = 0
    fates: dict[str, int] = {}
    staleness: dict[int, int] = {}
    reissued: int = 0
    expired: int = 0
    released: int = 0
    unknown: dict[str, int] = {}
    problems: list[str] = []


class _Auditor(Replay):
    def __init__(self, eta: int) -> None:
        super().__init__()
        self.eta = eta
        self.staleness: Counter[int] = Counter()
        self.unknown: Counter[str] = Counter()
        self.problems: list[str] = []

    def doubt(self, sentence: str) -> None:
        self.problems.append(f"event {self.events}: {sentence}")

    def on_other(self, event: Event) -> None:
        if event.name == "other":
            self.doubt(f"{event.id} could not be read: {event.get('problem')}")
        else:
            self.unknown[event.name] += 1

    def on_occupied(self, group: GroupHistory) -> None:
        assert group.place is not None
        if group.place.buffer > group.v_traj + self.eta:
            self.doubt(f"group {group.group} of v{group.v_traj} was placed in buffer {group.place.buffer}")

    def on_taken(self, batch: Batch) -> None:
        self.staleness += batch.staleness
        for group in batch.groups:
            if not 0 <= batch.version - group.v_traj <= self.eta:
                self.doubt(f"group {group.group} was trained with staleness {batch.version - group.v_traj}")

    def on_returned(self, batch: Batch) -> None:
        self.staleness -= batch.staleness

    def compare(self, snapshot: Snapshot) -> None:
        """Compare the ledger and the slots with those in Redis."""
        if self.slots != {place: group for place, (_, group) in snapshot.slots.items()}:
            self.problems.append("the slots in Redis differ from those that the events lead to")
        fates = Counter(self.prompts.values())
        for what, replayed, stored in (
            ("trained", fates["trained"], snapshot.number("trained")),
            ("filtered", fates["filtered"], snapshot.number("filtered")),
            ("discarded", fates["discarded"], snapshot.number("discarded")),
            ("requeued", fates["requeued"], len(snapshot.requeued)),
            ("dead", fates["dead"], len(snapshot.dead)),
            ("ordinals issued", self.next_ordinal, snapshot.number("next_ordinal")),
        ):
            if replayed != stored:
                self.problems.append(f"{what}: {replayed} in the events, {stored} in Redis")


def audit_events(events: Iterable[Event], eta: int, snapshot: Snapshot | None = None) -> Audit:
    """Replay a run's events, checking that each is consistent with those before it.

    Args:
        events: all events of the run, from its creation.
        eta: its maximum staleness.
        snapshot: the state of the idle run in Redis, to compare with; None skips the comparison.
    """
    auditor = _Auditor(eta)
    for event in events:
        auditor.apply(event)
        if auditor.events == 1 and not auditor.whole:
            break  # later events cannot be checked without the missing ones
    if snapshot is not None:
        auditor.compare(snapshot)
    return Audit(
        events=auditor.events,
        issued=auditor.next_ordinal,
        fates=dict(Counter(auditor.prompts.values())),
        staleness=dict(auditor.staleness),
        reissued=auditor.reissued,
        expired=auditor.expired,
        released=auditor.released,
        unknown=dict(auditor.unknown),
        problems=auditor.problems,
    )
