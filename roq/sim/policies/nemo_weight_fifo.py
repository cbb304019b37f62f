"""NeMo-RL, ``weight_fifo``: batches in the order of the weights that the prompts began with (W = eta).

Dispatch is that of ``in_order``. The trainer takes finished groups one by one, each time only of the smallest
start version among all groups that are buffered, unfinished ones included; when none of those has finished it
waits. What it has taken stays taken. Nothing is discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roq.sim.instance import Group
from roq.sim.queue import QueuePolicy

if TYPE_CHECKING:
    from roq.sim.world import World

__all__ = ["POLICY"]


class NemoWeightFifo(QueuePolicy):
    """Oldest weights first, among the groups that have finished."""

    name = "nemo-weight-fifo"

    def __init__(self, world: World) -> None:
        self._taken: list[Group] = []
        super().__init__(world)

    def submit(self) -> None:
        """Dispatch whole batches up to version + W."""
        while len(self.world.groups) < self.batch_size * (self.world.version + self.eta + 1):
            self.dispatch(self.batch_size)

    def batch(self) -> list[Group] | None:
        """Take what may be taken; a batch once there are B."""
        while len(self._taken) < self.batch_size:
            oldest = min(group.start for group in (*self.running, *self.ready))
            group = next((group for group in self.ready if group.start == oldest), None)
            if group is None:
                return None
            self._taken += self.take([group])
        batch, self._taken = self._taken, []
        return batch


POLICY = NemoWeightFifo
