"""The asynchronous client: the methods of :class:`roq.Scheduler`, awaited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from roq.client.driver import AsyncDriver
from roq.client.operations import Operations
from roq.config import RunConfig
from roq.errors import Refused
from roq.events.audit import Audit
from roq.events.event import BEGINNING, Event
from roq.trajectory import Response, Trajectory
from roq.types import (
    Batch,
    BatchGroup,
    CallStats,
    Completion,
    DeadLetter,
    Grant,
    Release,
    Removal,
    Renewal,
    Reservation,
    SlotStatus,
    Status,
    WeightsRef,
)

__all__ = ["AsyncScheduler"]


class AsyncScheduler:
    """A run on a Redis server, for asyncio: every call of :class:`roq.Scheduler`, awaited.

    It belongs to the event loop in which it is first used, until ``aclose``. There is no ``stop``: cancelling
    a call ends its wait for the server.
    """

    def __init__(self, url: str, run: str, *, retry_s: float | None = 60.0) -> None:
        self.url = url
        self.run = run
        self._operations = Operations(run)
        self._driver = AsyncDriver(url, self._operations, retry_s)
        self.stats = self._driver.stats
        self._acknowledged: dict[str, int] = {}

    async def aclose(self) -> None:
        """Close the connections. Nothing on the server changes; a later call connects anew."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- the run ------------------------------------------------------------------------------------

    async def create(
        self, config: RunConfig, *, settings: Mapping[str, str] | None = None, weights: str | None = None
    ) -> bool:
        """As :meth:`Scheduler.create`."""
        return await self._driver.run(self._operations.create(config, settings, weights))

    async def config(self) -> RunConfig:
        """As :meth:`Scheduler.config`."""
        return await self._driver.run(self._operations.config())

    async def settings(self) -> dict[str, str]:
        """As :meth:`Scheduler.settings`."""
        return await self._driver.run(self._operations.settings())

    async def pause(self, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.pause`."""
        await self._driver.run(self._operations.pause(reason))

    async def resume(self, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.resume`."""
        await self._driver.run(self._operations.resume(reason))

    async def dead(self) -> list[DeadLetter]:
        """As :meth:`Scheduler.dead`."""
        return await self._driver.run(self._operations.dead())

    async def revive(self, ordinal: int, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.revive`."""
        await self._driver.run(self._operations.revive(ordinal, reason))

    async def drain(self, worker: str, reason: str = "by hand") -> int:
        """As :meth:`Scheduler.drain`."""
        return await self._driver.run(self._operations.drain(worker, reason))

    async def drop(self, group: int, reason: str) -> Removal:
        """As :meth:`Scheduler.drop`."""
        return await self._driver.run(self._operations.drop(group, reason))

    async def filter(self, group: int, reason: str) -> Removal:
        """As :meth:`Scheduler.filter`."""
        return await self._driver.run(self._operations.filter(group, reason))

    async def status(self) -> Status:
        """As :meth:`Scheduler.status`."""
        return await self._driver.run(self._operations.status())

    async def verify(self) -> list[str]:
        """As :meth:`Scheduler.verify`."""
        return await self._driver.run(self._operations.verify())

    # -- looking on ---------------------------------------------------------------------------------

    async def audit(self, events: Iterable[Event] | None = None) -> Audit:
        """As :meth:`Scheduler.audit`."""
        return await self._driver.run(self._operations.audit(events))

    async def events(
        self, after: str = BEGINNING, *, known: int | None = None, wait_s: float = 0.0
    ) -> list[Event]:
        """As :meth:`Scheduler.events`."""
        return await self._driver.run(self._operations.events(after, known, wait_s))

    async def newest_event(self, name: str | None) -> Event | None:
        """As :meth:`Scheduler.newest_event`."""
        return await self._driver.run(self._operations.newest_event(name))

    async def slots(self) -> list[SlotStatus]:
        """As :meth:`Scheduler.slots`."""
        return await self._driver.run(self._operations.slots())

    async def call_stats(self) -> dict[str, CallStats]:
        """As :meth:`Scheduler.call_stats`."""
        return await self._driver.run(self._operations.call_stats())

    async def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        """As :meth:`Scheduler.wait`."""
        return await self._driver.sleep(self._operations.wait(signal, timeout_s, batch))

    # -- workers ------------------------------------------------------------------------------------

    async def reserve(self, worker: str, version: int, limit: int) -> Grant:
        """As :meth:`Scheduler.reserve`."""
        return await self._driver.run(self._operations.reserve(worker, version, limit))

    async def complete(self, reservation: Reservation, payload: Trajectory) -> Completion:
        """As :meth:`Scheduler.complete`."""
        return await self._driver.run(self._operations.complete(reservation, payload))

    async def complete_many(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> list[Completion | Refused]:
        """As :meth:`Scheduler.complete_many`."""
        return await self._driver.run(self._operations.complete_many(finished))

    async def group_trajectories(self, group: int) -> list[Trajectory]:
        """As :meth:`Scheduler.group_trajectories`."""
        return await self._driver.run(self._operations.group_trajectories(group))

    async def judge(
        self,
        reservation: Reservation,
        *,
        keep: bool = True,
        reason: str = "",
        advantages: Sequence[float] | None = None,
    ) -> Completion:
        """As :meth:`Scheduler.judge`."""
        return await self._driver.run(self._operations.judge(reservation, keep, reason, advantages))

    async def release(
        self, reservation: Reservation, prefix: Response | None = None, reason: str = "detach"
    ) -> Release:
        """As :meth:`Scheduler.release`."""
        return await self._driver.run(self._operations.release(reservation, prefix, reason))

    async def fail(self, reservation: Reservation, error: str) -> Release:
        """As :meth:`Scheduler.fail`."""
        return await self._driver.run(self._operations.fail(reservation, error))

    async def save_prefix(self, reservation: Reservation, prefix: Response) -> None:
        """As :meth:`Scheduler.save_prefix`."""
        await self._driver.run(self._operations.save_prefix(reservation, prefix))

    async def renew(
        self, worker: str, version: int | None = None, info: Mapping[str, object] | None = None
    ) -> Renewal:
        """As :meth:`Scheduler.renew`."""
        acknowledged = self._acknowledged.get(worker, 0)
        renewal = await self._driver.run(self._operations.renew(worker, version, info, acknowledged))
        self._acknowledged[worker] = renewal.acknowledge
        return renewal

    async def pin(self, worker: str, version: int | None = None) -> WeightsRef:
        """As :meth:`Scheduler.pin`."""
        return await self._driver.run(self._operations.pin(worker, version))

    async def leave(self, worker: str) -> None:
        """As :meth:`Scheduler.leave`."""
        await self._driver.run(self._operations.leave(worker))

    # -- the trainer --------------------------------------------------------------------------------

    async def take(self, trainer: str, version: int | None = None) -> Batch | None:
        """As :meth:`Scheduler.take`."""
        return await self._driver.run(self._operations.take(trainer, version))

    async def trajectories(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
        """As :meth:`Scheduler.trajectories`."""
        return await self._driver.run(self._operations.trajectories(groups))

    async def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """As :meth:`Scheduler.publish`."""
        await self._driver.run(self._operations.publish(version, weights, trainer, metrics))

    async def announce_sender(self, address: str, trainer: str) -> None:
        """As :meth:`Scheduler.announce_sender`."""
        await self._driver.run(self._operations.announce_sender(address, trainer))

    async def checkpointed(self, version: int, trainer: str) -> None:
        """As :meth:`Scheduler.checkpointed`."""
        await self._driver.run(self._operations.checkpointed(version, trainer))

    async def weights(self) -> list[WeightsRef]:
        """As :meth:`Scheduler.weights`."""
        return await self._driver.run(self._operations.weights())

    async def retire_weights(self, trainer: str, keep: int) -> list[WeightsRef]:
        """As :meth:`Scheduler.retire_weights`."""
        return await self._driver.run(self._operations.retire_weights(trainer, keep))
