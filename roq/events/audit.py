"""The proof after the fact: replay a run's events and compare the outcome with what Redis has.

Every ordinal must have been issued once and be accounted for once; every group that was trained must have
kept its bound; and every move must lead to the slots as they are. The events must be whole: a run that is
to be audited needs an ``event_log`` longer than its history, or an archive of it.
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
    """What an audit found.

    Attributes:
        events: events replayed.
        issued: ordinals issued.
        fates: how many ordinals ended as trained, in_slots, requeued, filtered, discarded, dead.
        staleness: trained groups by staleness.
        reissued, expired, released: leases that went to another attempt, and why.
        problems: one sentence for each contradiction; empty when the run is proved.
    """

    events: int = 0
    issued: int = 0
    fates: dict[str, int] = {}
    staleness: dict[int, int] = {}
    reissued: int = 0
    expired: int = 0
    released: int = 0
    problems: list[str] = []


class _Auditor(Replay):
    def __init__(self, eta: int) -> None:
        super().__init__()
        self.eta = eta
        self.staleness: Counter[int] = Counter()
        self.problems: list[str] = []

    def doubt(self, sentence: str) -> None:
        self.problems.append(f"event {self.events}: {sentence}")

    def on_occupied(self, group: GroupHistory) -> None:
        assert group.place is not None
        if group.place.buffer > group.v_traj + self.eta:
            self.doubt(f"group {group.group} of v{group.v_traj} was put into buffer {group.place.buffer}")

    def on_taken(self, batch: Batch) -> None:
        self.staleness += batch.staleness
        for group in batch.groups:
            if not 0 <= batch.version - group.v_traj <= self.eta:
                self.doubt(f"group {group.group} was trained with staleness {batch.version - group.v_traj}")

    def compare(self, snapshot: Snapshot) -> None:
        """Compare the ledger and the slots with the server's."""
        if self.slots != {place: group for place, (_, group) in snapshot.slots.items()}:
            self.problems.append("the slots are not where the events lead to")
        fates = Counter(self.prompts.values())
        for what, told, there in (
            ("trained", fates["trained"], snapshot.number("trained")),
            ("filtered", fates["filtered"], snapshot.number("filtered")),
            ("discarded", fates["discarded"], snapshot.number("discarded")),
            ("requeued", fates["requeued"], len(snapshot.requeued)),
            ("dead", fates["dead"], len(snapshot.dead)),
            ("ordinals issued", self.next_ordinal, snapshot.number("next_ordinal")),
        ):
            if told != there:
                self.problems.append(f"the events tell of {told} {what}, Redis of {there}")


def audit_events(events: Iterable[Event], eta: int, snapshot: Snapshot | None = None) -> Audit:
    """Replay a run's events: each must follow from those before it.

    Args:
        events: all events of the run, from its creation on.
        eta: its maximum staleness.
        snapshot: what the server had when the run stood still; the events must lead there.
    """
    auditor = _Auditor(eta)
    for event in events:
        auditor.apply(event)
        if auditor.events == 1 and not auditor.whole:
            break  # nothing follows from what is missing
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
        problems=auditor.problems,
    )
