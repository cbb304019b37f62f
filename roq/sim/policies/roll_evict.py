"""ROLL with eviction, the variant that the article measures.

The quota is ROLL's. A batch takes whatever has finished within the window, oldest first. When the version
rises, groups whose start has left the window are discarded: running ones are stopped (L2), finished ones
dropped (L3). Their quota is used for fresh prompts.
"""

from __future__ import annotations

from roq.sim.instance import Group
from roq.sim.policies.roll import Roll

__all__ = ["POLICY"]


class RollEvict(Roll):
    """Never waits for the oldest; stops it when it is too old."""

    name = "roll-evict"

    def published(self) -> None:
        """Evict what has left the window, then use the quota."""
        first = self.world.version - self.eta
        for group in [group for group in self.running if group.start < first]:
            self.abort(group)
        for group in [group for group in self.ready if group.start < first]:
            self.drop(group)
        super().published()

    def batch(self) -> list[Group] | None:
        """The B oldest finished groups."""
        return self.take_oldest(up_to=self.world.version)


POLICY = RollEvict
