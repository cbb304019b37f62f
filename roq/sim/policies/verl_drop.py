"""verl, separate asynchronous trainer with ``drop`` (staleness threshold eta + 1, one update per sync).

``num_warmup_batches`` batches, and in each step one more, are submitted at once, tagged with the step's
number (from 1). The trainer collects B finished groups, smallest tags first. Finished groups whose tag is
more than eta steps old are deleted whole, and as many fresh prompts are submitted. Running groups are never
stopped.
"""

from __future__ import annotations

from roq.sim.instance import Group
from roq.sim.queue import QueuePolicy

__all__ = ["POLICY"]

WARMUP_BATCHES = 1  # verl's default, as in the article


class VerlDrop(QueuePolicy):
    """A fixed quota a step; what finishes too late is deleted and replaced."""

    name = "verl-drop"

    def submit(self) -> None:
        """Delete what is too old, and keep to the quota: one batch a step, and one for each deleted group."""
        for group in [group for group in self.ready if self.world.version - group.start > self.eta]:
            self.drop(group)
        quota = self.batch_size * (WARMUP_BATCHES + self.world.version + 1)
        self.dispatch(quota + self.discarded - len(self.world.groups))

    def batch(self) -> list[Group] | None:
        """The B oldest finished groups."""
        if len(self.ready) < self.batch_size:
            return None
        return self.take(sorted(self.ready, key=lambda group: group.start)[: self.batch_size])


POLICY = VerlDrop
