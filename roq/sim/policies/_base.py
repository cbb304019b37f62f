"""What every policy answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from roq.sim.instance import Group, Instance, Sample

if TYPE_CHECKING:
    from roq.sim.scenario import Scenario
    from roq.sim.world import World

__all__ = ["Policy"]


class Policy(ABC):
    """A staleness mechanism. ``name`` is the file's name with ``-`` for ``_``."""

    name: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        scenario = world.scenario
        self.check(scenario)
        self.eta = scenario.eta
        self.batch_size = scenario.batch_size
        self.group_size = scenario.group_size

    @classmethod  # noqa: B027 - most can fill any batch
    def check(cls, scenario: Scenario) -> None:
        """Refuse (ConfigError) a scenario in which this mechanism can never fill a batch."""

    @abstractmethod
    def admit(self, instance: Instance) -> list[Sample]:
        """Responses to start on this instance, at most as many as it has free places; asked until empty."""

    @abstractmethod
    def finish(self, samples: list[Sample]) -> None:
        """These responses have ended."""

    @abstractmethod
    def batch(self) -> list[Group] | None:
        """The trainer is idle: the groups to train at this version, or None while it must wait."""

    def published(self) -> None:  # noqa: B027 - most need nothing more than this
        """The version has risen by one."""

    def loaded(self, instance: Instance) -> None:  # noqa: B027
        """The instance serves new weights."""

    def batch_possible(self) -> bool:
        """Whether some legal placement of what is finished would make a batch; roq alone can say."""
        return False

    def close(self) -> None:  # noqa: B027
        """The run is over."""
