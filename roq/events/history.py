"""What is known of a member, a group and a batch from a run's events. Times are in seconds since 1970."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Literal

import msgspec

from roq.events.event import Event, Place

__all__ = ["FATES", "Batch", "Fate", "GroupHistory", "MemberHistory", "groups_of"]

Fate = Literal["requeued", "discarded", "filtered", "dead"]
"""What becomes of a group that leaves its slot untrained."""
FATES: tuple[Fate, ...] = ("requeued", "discarded", "filtered", "dead")
State = Literal["reserved", "judging", "occupied", "training", "trained"] | Fate


class MemberHistory(msgspec.Struct):
    """One candidate of a group.

    Attributes:
        worker: who has it, or had it when it was completed; "" while it waits to be issued.
        issued, completed: when; None when not.
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

    @property
    def running(self) -> bool:
        """Whether a worker has it now."""
        return self.issued is not None and self.completed is None and not self.cancelled


class GroupHistory(msgspec.Struct):
    """A group and what became of it. Times are None for what has not happened.

    Attributes:
        group, ordinal: its number and its prompt's.
        v_traj: oldest weights version of any part.
        place: its slot; None once it was taken or left.
        state: where it is. batch: the batch it was taken with.
        reserved, finished, occupied, taken, left: when; ``finished`` is its last member's completion.
        reason: why it left.
        members: its candidates that were ever issued, by number; 0 is its post-processing while that runs.
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
        """Versions that the batch it was taken with is ahead of ``v_traj``."""
        return None if self.batch is None else self.batch - self.v_traj


class Batch(msgspec.Struct):
    """One batch, from the wait for it to its weights.

    Attributes:
        version: its number.
        waited_from: when the trainer could have taken it; None if that is not known.
        taken, published: when; ``published`` is None while it is in training.
        groups: its groups, in slot order, without those that are not known.
        metrics: what the trainer published with it.
    """

    version: int
    waited_from: float | None
    taken: float
    groups: list[GroupHistory]
    published: float | None = None
    metrics: dict[str, float] = {}

    @property
    def number(self) -> int:
        """The step that trains it, counted from 1."""
        return self.version + 1

    @property
    def wait_s(self) -> float:
        """How long the trainer waited for it."""
        return 0.0 if self.waited_from is None else max(0.0, self.taken - self.waited_from)

    @property
    def train_s(self) -> float | None:
        """From take to publish."""
        return None if self.published is None else self.published - self.taken

    @property
    def staleness(self) -> Counter[int]:
        """Its groups by staleness."""
        return Counter(self.version - group.v_traj for group in self.groups)

    @property
    def tokens(self) -> int:
        """Response tokens in it."""
        return sum(group.tokens for group in self.groups)

    @property
    def reward(self) -> float | None:
        """Mean reward of its trajectories; None without any."""
        rewards = [m.reward for g in self.groups for m in g.members.values() if m.reward is not None]
        return fmean(rewards) if rewards else None

    @property
    def last(self) -> GroupHistory | None:
        """The group that made it READY."""
        known = [group for group in self.groups if group.occupied is not None]
        return max(known, key=lambda group: group.occupied or 0.0, default=None)


def groups_of(event: Event) -> set[int]:
    """The groups that an event names: its own, those of a batch, those that it moved."""
    named = {int(number) for number in event.get("groups").split()}
    named |= {move.group for move in event.moves}
    return named | {event.number("group")} if "group" in event.fields else named
