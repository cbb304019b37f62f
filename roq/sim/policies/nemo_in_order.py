"""NeMo-RL, ``in_order``: a prompt's batch is fixed when it is dispatched (window W = eta).

Batch ``d`` of B prompts may be dispatched once ``d <= v + W`` and is trained at version ``d``, when all of it
has finished. Nothing is discarded; one long response holds up its own batch and no other can help out.
"""

from __future__ import annotations

from roq.sim.instance import Group
from roq.sim.queue import QueuePolicy

__all__ = ["POLICY"]


class NemoInOrder(QueuePolicy):
    """Trains the batches as they were dispatched."""

    name = "nemo-in-order"

    def submit(self) -> None:
        """Dispatch whole batches up to version + W."""
        while len(self.world.groups) < self.batch_size * (self.world.version + self.eta + 1):
            self.dispatch(self.batch_size)

    def batch(self) -> list[Group] | None:
        """The batch dispatched for this version, once it is whole."""
        first = self.batch_size * self.world.version
        groups = self.world.groups[first : first + self.batch_size]
        return self.take(groups) if all(group in self.ready for group in groups) else None


POLICY = NemoInOrder
