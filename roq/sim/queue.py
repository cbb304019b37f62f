"""The base of the other frameworks' policies: complete groups wait for capacity in one queue.

Free capacity takes the next response of the queue, and the instance with the most of it goes first. This is
an ideal load balancer, so the mechanisms differ only in their staleness control.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from roq.sim.instance import Group, Instance, Sample
from roq.sim.world import Policy

if TYPE_CHECKING:
    from roq.sim.world import World

__all__ = ["QueuePolicy"]


class QueuePolicy(Policy):
    """Groups in flight in the order of submission, and finished ones in the order of finishing."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.running: dict[Group, None] = {}
        self.ready: dict[Group, None] = {}
        self.discarded = 0
        self.queue: deque[Sample] = deque()
        self.submit()

    @abstractmethod
    def submit(self) -> None:
        """Submit the groups allowed now (L1); called at the start and after every change."""

    def dispatch(self, count: int) -> list[Group]:
        """Submit so many new prompts at the current version."""
        groups = [self.world.new_group(self.world.version) for _ in range(count)]
        for group in groups:
            self.running[group] = None
            self.queue.extend(group.samples)
        return groups

    def abort(self, group: Group) -> None:
        """Stop a group in flight (L2)."""
        del self.running[group]
        self.queue = deque(sample for sample in self.queue if sample.group is not group)
        self.discarded += 1
        self.world.discard(group)

    def drop(self, group: Group) -> None:
        """Throw a finished group away (L3)."""
        del self.ready[group]
        self.discarded += 1
        self.world.discard(group)

    def take(self, groups: list[Group]) -> list[Group]:
        """Train these finished groups."""
        for group in groups:
            del self.ready[group]
        return groups

    def admit(self, instance: Instance) -> list[Sample]:
        """The next response of the queue."""
        return [self.queue.popleft()] if self.queue and instance.free > 0 else []

    def finish(self, samples: list[Sample]) -> None:
        """Count members; a group with all of them is complete."""
        for sample in samples:
            group = sample.group
            group.unfinished -= 1
            if group.unfinished == 0:
                group.state = "waiting"
                del self.running[group]
                self.ready[group] = None
        self.submit()

    def published(self) -> None:
        """Room by the new version."""
        self.submit()
