"""A run as its events tell it: where every group is and was, when, and with whom.

For those who show a run or reckon about it. It believes the events, and passes over what it does not know
(the groups from before a trimmed stream begins); :mod:`roq.events.audit` is what doubts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from roq.events.event import Event, Place, parse_place

__all__ = ["Group", "Member", "Replay", "groups_of"]

Ends = Literal["requeued", "discarded", "filtered", "dead"]
State = Literal["reserved", "judging", "occupied", "training", "trained"] | Ends
ENDS: tuple[Ends, ...] = ("requeued", "discarded", "filtered", "dead")


class Member(msgspec.Struct):
    """One candidate of a group.

    Attributes:
        worker: who has it, or had it when it was completed; "" while it waits to be issued.
        issued, completed: when, in seconds since 1970; None when not.
        attempts: how often it was issued.
        cancelled: it was not needed, or its group left before it was done.
        tokens, reward: of the finished response.
    """

    worker: str = ""
    issued: float | None = None
    completed: float | None = None
    attempts: int = 0
    cancelled: bool = False
    tokens: int = 0
    reward: float | None = None


class Group(msgspec.Struct):
    """A group and what became of it. Times are in seconds since 1970, None for what has not happened.

    Attributes:
        group, ordinal: its number and its prompt's.
        v_traj: oldest weights version of any part.
        place: its slot; None once it was taken or left.
        state: where it is. batch: the batch it was taken with.
        reserved, finished, occupied, taken, left: when; ``finished`` is its last member's completion.
        reason: why it left.
        members: its candidates that were ever issued, by number.
    """

    group: int
    ordinal: int
    v_traj: int
    reserved: float
    place: Place | None = None
    state: State = "reserved"
    batch: int | None = None
    finished: float | None = None
    occupied: float | None = None
    taken: float | None = None
    left: float | None = None
    reason: str = ""
    members: dict[int, Member] = msgspec.field(default_factory=dict[int, Member])

    @property
    def tokens(self) -> int:
        """Response tokens of its finished members."""
        return sum(member.tokens for member in self.members.values())

    @property
    def staleness(self) -> int | None:
        """Versions that the batch it was taken with is ahead of ``v_traj``."""
        return None if self.batch is None else self.batch - self.v_traj


def groups_of(event: Event) -> set[int]:
    """The groups that an event names: its own, those of a batch, those that it moved."""
    named = {int(number) for number in event.get("groups").split()}
    named |= {move.group for move in event.moves}
    return named | {event.number("group")} if "group" in event.fields else named


class Replay:
    """The run after the events that were fed to it.

    Attributes:
        groups: by number; all that were ever seen, unless :meth:`forget` is called.
        slots: what is in each filled slot.
        version: the newest published weights. training: the batch being trained, or None.
        workers: who is attached.
        trainer: who trains. paused, ended: as of now.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.slots: dict[Place, int] = {}
        self.batches: dict[int, list[int]] = {}
        self.version = 0
        self.training: int | None = None
        self.workers: set[str] = set()
        self.trainer = ""
        self.paused = False
        self.ended = False

    def feed(self, event: Event) -> None:
        """Take in the next event."""
        if event.name in ENDS:
            self._end(event, event.name)
            return
        handler: Callable[[Event], None] | None = getattr(self, f"_on_{event.name}", None)
        if handler is not None:
            handler(event)

    def forget(self, groups: Iterable[int]) -> None:
        """Drop groups that have left the slots, for those who run for ever."""
        for number in groups:
            self.groups.pop(number, None)

    # -- slots --------------------------------------------------------------------------------------

    def _vacate(self, group: Group) -> None:
        if group.place is not None and self.slots.get(group.place) == group.group:
            del self.slots[group.place]
        group.place = None

    def _put(self, group: Group, place: Place) -> None:
        self._vacate(group)
        self.slots[place], group.place = group.group, place

    def _move(self, event: Event) -> None:
        for move in event.moves:
            if (group := self.groups.get(move.group)) is not None:
                self._put(group, move.target)

    def _cancel_open(self, group: Group) -> None:
        group.members.pop(0, None)  # its post-processing is over, or was never begun
        for member in group.members.values():
            member.cancelled = member.completed is None

    # -- events -------------------------------------------------------------------------------------

    def _on_reserve(self, event: Event) -> None:
        group = Group(
            event.number("group"), event.number("ordinal"), event.number("v_traj"), reserved=event.time
        )
        self.groups[group.group] = group
        self._put(group, parse_place(event.get("at")))
        self._issue(group, event)

    def _on_issue(self, event: Event) -> None:
        if (group := self.groups.get(event.number("group"))) is not None:
            group.v_traj = event.number("v_traj", group.v_traj)
            self._issue(group, event)

    _on_reissue = _on_issue

    def _issue(self, group: Group, event: Event) -> None:
        for number in event.get("members").split(","):
            member = group.members.setdefault(int(number), Member())
            member.worker, member.issued = event.get("worker"), event.time
            member.attempts += 1

    def _member(self, event: Event) -> Member | None:
        group = self.groups.get(event.number("group"))
        return None if group is None else group.members.setdefault(event.number("member"), Member())

    def _on_complete(self, event: Event) -> None:
        if (member := self._member(event)) is not None:
            member.worker, member.completed = event.get("worker"), event.time
            member.tokens, member.reward = event.number("tokens"), float(event.get("reward", "0"))
            self.groups[event.number("group")].finished = event.time

    def _on_release(self, event: Event) -> None:
        if (member := self._member(event)) is not None:
            member.worker, member.issued = "", None

    _on_expired = _on_release

    def _on_judging(self, event: Event) -> None:
        if (group := self.groups.get(event.number("group"))) is not None:
            self._cancel_open(group)
            group.state = "judging"
            group.members[0] = Member(event.get("worker"), event.time, attempts=1)

    def _on_occupy(self, event: Event) -> None:
        group = self.groups.get(event.number("group"))
        if group is not None:
            self._vacate(group)
        self._move(event)
        if group is not None:
            group.state, group.occupied = "occupied", event.time
            group.v_traj = event.number("v_traj", group.v_traj)
            self._cancel_open(group)
            self._put(group, parse_place(event.get("at")))

    def _end(self, event: Event, fate: Ends) -> None:
        if (group := self.groups.get(event.number("group"))) is not None:
            self._vacate(group)
            self._cancel_open(group)
            group.state, group.left, group.reason = fate, event.time, event.get("reason")
        self._move(event)

    def _on_take(self, event: Event) -> None:
        self._move(event)
        self.training = event.number("version")
        self.batches[self.training] = [int(number) for number in event.get("groups").split()]
        for number in self.batches[self.training]:
            if (group := self.groups.get(number)) is not None:
                self._vacate(group)
                group.state, group.taken, group.batch = "training", event.time, self.training

    def _on_publish(self, event: Event) -> None:
        self.version, self.training = event.number("version"), None
        for number in self.batches.pop(self.version - 1, []):
            if (group := self.groups.get(number)) is not None:
                group.state, group.left = "trained", event.time

    def _on_worker_joined(self, event: Event) -> None:
        self.workers.add(event.get("worker"))

    def _on_worker_left(self, event: Event) -> None:
        self.workers.discard(event.get("worker"))

    _on_worker_lost = _on_worker_left

    def _on_trainer_joined(self, event: Event) -> None:
        self.trainer = event.get("trainer")

    def _on_paused(self, _event: Event) -> None:
        self.paused = True

    def _on_resumed(self, _event: Event) -> None:
        self.paused = False

    def _on_ended(self, _event: Event) -> None:
        self.ended = True
