"""ROLL, RLVR pipeline (``async_generation_ratio`` eta), as it is by default.

A quota of running and finished prompts: B * (1 + eta) at first, B more each step. A batch takes finished
groups from the oldest start step on, and waits for the unfinished ones of that step; so nothing is evicted.
"""

from __future__ import annotations

from roq.sim.instance import Group
from roq.sim.queue import QueuePolicy

__all__ = ["POLICY", "Roll"]


class Roll(QueuePolicy):
    """Oldest step first, and all of it."""

    name = "roll"

    def submit(self) -> None:
        """Use the quota; what was discarded gives its part back."""
        quota = self.batch_size * (1 + self.eta + self.world.version)
        self.dispatch(quota + self.discarded - len(self.world.groups))

    def batch(self) -> list[Group] | None:
        """The oldest finished groups, once every older step than the last that is needed is whole."""
        oldest_first = sorted((*self.running, *self.ready), key=lambda group: group.start)
        if len(oldest_first) < self.batch_size:
            return None
        last = oldest_first[self.batch_size - 1].start
        if any(group.start < last for group in self.running):
            return None
        return self.take_oldest(up_to=last)

    def take_oldest(self, up_to: int) -> list[Group] | None:
        """The B oldest finished groups of these steps; None when there are fewer."""
        finished = sorted((g for g in self.ready if g.start <= up_to), key=lambda group: group.start)
        return self.take(finished[: self.batch_size]) if len(finished) >= self.batch_size else None


POLICY = Roll
