"""The histories of members, groups and batches. Times are seconds since 1970."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Literal

import msgspec

from roq.events.event import Event, Place

__all__ = ["FATES", "Batch", "Fate", "GroupHistory", "MemberHistory", "groups_of"]

Fate = Literal["requeued", "discarded", "filtered", "dead"]
"""The fate of a group that leaves its slot untrained."""
FATES: tuple[Fate, ...] = ("requeued", "discarded", "filtered", "dead")
State = Literal["reserved", "judging", "occupied", "training", "trained"] | Fate


class MemberHistory(msgspec.Struct):
    """One candidate of a group.

    Attributes:
        worker: the worker that holds it or completed it; "" while it waits to be issued.
        issued, completed: times; None until then.
        attempts: number of times it was issued.
        cancelled: it was not needed, or its group left first.
        tokens, reward: of the finished response.
    """

    worker: str = ""
    issued: float | None = None
    completed: float | None = None
    attempts: int = 0
    cancelled: bool = False
    tokens: int = 0
    reward: float | None = None

    @property
    def running(self) -> bool:
        """A worker holds it now."""
        return self.issued is not None and self.completed is None and not self.cancelled


class GroupHistory(msgspec.Struct):
    """The history of a group. Times are None for events that have not happened.

    Attributes:
        group, ordinal: its number and its prompt's.
        v_traj: oldest weights version of any part.
        place: its slot; None once taken or removed.
        state: its current state. batch: the batch it was taken with.
        reserved, finished, occupied, taken, left: times; ``finished`` is its last member's completion.
        reason: why it left.
        members: candidates issued so far, by number; 0 is post-processing while it runs.
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
    members: dict[int, MemberHistory] = msgspec.field(default_factory=dict[int, MemberHistory])

    @property
    def tokens(self) -> int:
        """Response tokens of its finished members."""
        return sum(member.tokens for member in self.members.values())

    @property
    def staleness(self) -> int | None:
        """Versions from ``v_traj`` to the batch it was taken with; None before."""
        return None if self.batch is None else self.batch - self.v_traj


class Batch(msgspec.Struct):
    """The history of a batch, from the wait for it to the weights trained on it.

    Attributes:
        version: its number.
        waited_from: when the trainer became free to take it; None if unknown.
        taken, published: times; ``published`` is None while it is in training.
        groups: its known groups, in slot order.
        metrics: the metrics that the trainer published with it.
    """

    version: int
    waited_from: float | None
    taken: float
    groups: list[GroupHistory]
    published: float | None = None
    metrics: dict[str, float] = {}

    @property
    def number(self) -> int:
        """The step that trains it, from 1."""
        return self.version + 1

    @property
    def wait_s(self) -> float:
        """Seconds the trainer waited for it."""
        return 0.0 if self.waited_from is None else max(0.0, self.taken - self.waited_from)

    @property
    def train_s(self) -> float | None:
        """Seconds from take to publish; None before."""
        return None if self.published is None else self.published - self.taken

    @property
    def staleness(self) -> Counter[int]:
        """The number of its groups by staleness."""
        return Counter(self.version - group.v_traj for group in self.groups)

    @property
    def tokens(self) -> int:
        """Response tokens in it."""
        return sum(group.tokens for group in self.groups)

    @property
    def reward(self) -> float | None:
        """Mean reward of its trajectories; None if there are none."""
        rewards = [m.reward for g in self.groups for m in g.members.values() if m.reward is not None]
        return fmean(rewards) if rewards else None

    @property
    def last(self) -> GroupHistory | None:
        """The group that made it READY."""
        known = [group for group in self.groups if group.occupied is not None]
        return max(known, key=lambda group: group.occupied or 0.0, default=None)


def groups_of(event: Event) -> set[int]:
    """Return the groups that an event names: its own, those of a batch, and those it moved."""
    named = {int(number) for number in event.get("groups").split()}
    named |= {move.group for move in event.moves}
    return named | {event.number("group")} if "group" in event.fields else named
