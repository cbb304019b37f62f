"""TRL, asynchronous GRPO (``max_staleness`` eta): generation continues, old groups are dropped when popped.

Admission is a cap on samples in flight, eta * B * G; finished ones do not count. A group's version is that at
which its first sample began. Finished groups queue in the order in which they finish, and generation stops
while 1,024 samples are queued. The trainer pops groups, drops those that are more than eta versions old, and
keeps popping until it has B.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from roq.errors import ConfigError
from roq.sim.instance import Group, Sample
from roq.sim.queue import QueuePolicy

if TYPE_CHECKING:
    from roq.sim.scenario import Scenario
    from roq.sim.world import World

__all__ = ["POLICY"]

QUEUE_SAMPLES = 1024


class Trl(QueuePolicy):
    """First finished, first popped."""

    name = "trl"

    def __init__(self, world: World) -> None:
        self._kept: list[Group] = []
        self._rest: deque[Sample] = deque()  # of the group whose samples are being submitted
        self._in_flight = 0
        super().__init__(world)

    @classmethod
    def check(cls, scenario: Scenario) -> None:
        """Nothing is admitted with eta = 0."""
        if scenario.eta == 0:
            raise ConfigError("trl admits eta * B * G samples at once: with eta = 0 it can generate nothing")

    def submit(self) -> None:
        """Sample by sample, up to the cap."""
        if len(self.ready) * self.group_size >= QUEUE_SAMPLES:
            return
        while self._in_flight < self.eta * self.batch_size * self.group_size:
            if not self._rest:
                group = self.world.new_group(self.world.version)
                self.running[group] = None
                self._rest.extend(group.samples)
            self.queue.append(self._rest.popleft())
            self._in_flight += 1

    def finish(self, samples: list[Sample]) -> None:
        """Finished samples make room."""
        self._in_flight -= len(samples)
        super().finish(samples)

    def batch(self) -> list[Group] | None:
        """Pop the queue; a batch once B groups were fresh enough."""
        while self.ready and len(self._kept) < self.batch_size:
            group = next(iter(self.ready))
            if self.world.version - group.start > self.eta:
                self.drop(group)
            else:
                self._kept += self.take([group])
        self.submit()
        if len(self._kept) < self.batch_size:
            return None
        batch, self._kept = self._kept, []
        return batch


POLICY = Trl
