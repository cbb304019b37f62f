"""The proof after the fact: replay a run's event stream and hold it against what Redis has at the end.

Every ordinal must have been issued once and be accounted for once; every group that was trained must
have kept its bound; and every move of every slot must lead to the slots as they are. The stream must be
whole: a run that should be audited needs an ``event_log`` longer than its history, or an archive of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from roq.events.event import Place, parse_moves, parse_place
from roq.protocol.invariants import Snapshot

__all__ = ["Audit", "audit_archive", "audit_events"]

Event = Mapping[str, str]

_ENDS = ("requeued", "discarded", "filtered", "dead")


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


class _Group(msgspec.Struct):
    ordinal: int
    v_traj: int
    place: Place | None
    finished: bool = False


class _Replay:
    """The run as its events tell it."""

    def __init__(self, eta: int) -> None:
        self.eta = eta
        self.found = Audit()
        self.groups: dict[int, _Group] = {}
        self.slots: dict[Place, int] = {}
        self.fate: dict[int, str] = {}  # ordinal -> where it is
        self.batches: dict[int, list[int]] = {}
        self.version = 0

    def problem(self, sentence: str) -> None:
        self.found.problems.append(f"event {self.found.events}: {sentence}")

    def replay(self, event: Event) -> None:
        self.found.events += 1
        name = event["event"]
        if name in _ENDS:
            self.end(event, name)
        handler: Callable[[Event], None] | None = getattr(self, f"on_{name}", None)
        if handler is not None:
            handler(event)

    def vacate(self, number: int) -> _Group | None:
        """Take a group out of its slot; None when it is not live."""
        group = self.groups.get(number)
        if group is None or group.place is None:
            self.problem(f"group {number} is not in the run")
            return None
        if self.slots.get(group.place) == number:  # not when another was put there
            del self.slots[group.place]
        group.place = None
        return group

    def fill(self, number: int, place: Place) -> None:
        if place in self.slots:
            self.problem(f"group {number} went to slot {place}, where group {self.slots[place]} was")
        self.slots[place] = number
        self.groups[number].place = place

    def move(self, event: Event) -> None:
        for who, source, target in parse_moves(event.get("moves", "")):
            known = self.groups.get(who)
            if known is not None and known.place not in (None, source):
                self.problem(f"group {who} moved from {source}, but it was at {known.place}")
            if self.vacate(who) is not None:
                self.fill(who, target)

    # -- events -------------------------------------------------------------------------------------

    def on_reserve(self, event: Event) -> None:
        number, ordinal = int(event["group"]), int(event["ordinal"])
        if ordinal == self.found.issued:
            self.found.issued += 1
        elif self.fate.get(ordinal) != "requeued":
            self.problem(f"ordinal {ordinal} was issued again while it was {self.fate.get(ordinal)}")
        if number in self.groups:
            self.problem(f"group {number} was made twice")
        self.fate[ordinal] = "in_slots"
        self.groups[number] = _Group(ordinal, int(event["v_traj"]), None)
        self.fill(number, parse_place(event["at"]))

    def on_reissue(self, event: Event) -> None:
        self.found.reissued += len(event["members"].split(","))
        self.on_issue(event)

    def on_issue(self, event: Event) -> None:
        group = self.groups.get(int(event["group"]))
        if group is None or group.place != parse_place(event["at"]):
            self.problem(f"group {event['group']} was issued at {event['at']}, which is not its place")

    def on_revived(self, event: Event) -> None:
        ordinal = int(event["ordinal"])
        if self.fate.get(ordinal) != "dead":
            self.problem(f"ordinal {ordinal} was revived while it was {self.fate.get(ordinal)}")
        self.fate[ordinal] = "requeued"

    def on_gap(self, event: Event) -> None:
        self.problem(f"{event.get('missing', 'some')} events were trimmed from the stream before here")

    def on_expired(self, _event: Event) -> None:
        self.found.expired += 1

    def on_release(self, _event: Event) -> None:
        self.found.released += 1

    def on_occupy(self, event: Event) -> None:
        group = self.vacate(int(event["group"]))
        self.move(event)
        if group is not None:
            if group.finished:
                self.problem(f"group {event['group']} was finished twice")
            group.finished, group.v_traj = True, int(event["v_traj"])
            place = parse_place(event["at"])
            if place[0] > group.v_traj + self.eta:
                self.problem(f"group {event['group']} of v{group.v_traj} was put into buffer {place[0]}")
            self.fill(int(event["group"]), place)

    def end(self, event: Event, fate: str) -> None:
        group = self.vacate(int(event["group"]))
        self.move(event)
        if group is not None:
            self.fate[group.ordinal] = fate

    def on_take(self, event: Event) -> None:
        version = int(event["version"])
        self.move(event)
        numbers = [int(number) for number in event["groups"].split()]
        if version in self.batches:
            self.problem(f"batch {version} was taken twice")
        self.batches[version] = numbers
        for slot, number in enumerate(numbers, start=1):
            group = self.groups.get(number)
            if group is None or group.place != (version, slot) or not group.finished:
                self.problem(f"batch {version} names group {number} in slot {slot}, where it is not finished")
                continue
            staleness = version - group.v_traj
            self.found.staleness[staleness] = self.found.staleness.get(staleness, 0) + 1
            if not 0 <= staleness <= self.eta:
                self.problem(f"group {number} was trained with staleness {staleness}")
            self.vacate(number)

    def on_publish(self, event: Event) -> None:
        version = int(event["version"])
        if version != self.version + 1:
            self.problem(f"version {version} was published after {self.version}")
        self.version = version
        known = [self.groups[number] for number in self.batches.get(version - 1, []) if number in self.groups]
        for ordinal in (group.ordinal for group in known):
            if self.fate[ordinal] != "in_slots":
                self.problem(f"ordinal {ordinal} was trained while it was {self.fate[ordinal]}")
            self.fate[ordinal] = "trained"


def audit_events(events: Iterable[Event], snapshot: Snapshot) -> Audit:
    """Replay ``events`` and compare the outcome with ``snapshot``, taken when the run stood still."""
    found, slots = _replayed(events, int(snapshot.config["eta"]))
    if slots != {place: group for place, (_, group) in snapshot.slots.items()}:
        found.problems.append("the slots are not where the events lead to")
    counted = {
        "trained": snapshot.number("trained"),
        "filtered": snapshot.number("filtered"),
        "discarded": snapshot.number("discarded"),
        "requeued": len(snapshot.requeued),
        "dead": len(snapshot.dead),
    }
    for fate, count in counted.items():
        if found.fates.get(fate, 0) != count:
            found.problems.append(f"the events tell of {found.fates.get(fate, 0)} {fate}, Redis of {count}")
    if found.issued != snapshot.number("next_ordinal"):
        found.problems.append(
            f"the events tell of {found.issued} ordinals issued, Redis of {snapshot.number('next_ordinal')}"
        )
    return found


def audit_archive(events: Iterable[Event], eta: int) -> Audit:
    """Replay ``events`` alone: each must follow from those before. Where the run is now, they cannot tell."""
    return _replayed(events, eta)[0]


def _replayed(events: Iterable[Event], eta: int) -> tuple[Audit, dict[Place, int]]:
    replay = _Replay(eta)
    for event in events:
        if event["event"] == "archive":
            continue
        if not replay.found.events and event["event"] != "created":
            replay.problem("the stream does not begin with the run's creation: older events were trimmed")
            break
        replay.replay(event)
    replay.found.fates = dict(Counter(replay.fate.values()))
    return replay.found, replay.slots
