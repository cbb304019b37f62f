"""The asynchronous client: the methods of :class:`roq.Scheduler`, awaited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from roq.client.driver import AsyncDriver
from roq.client.operations import Operations
from roq.client.scheduler import Scheduler
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
    """The asyncio client of a run: every call of :class:`roq.Scheduler`, awaited.

    It is bound to the event loop that first uses it, until ``aclose``. There is no ``stop``: cancelling a
    call ends its wait for the server.
    """

    def __init__(self, url: str, run: str, *, retry_s: float | None = 60.0) -> None:
        self.url = url
        self.run = run
        self._operations = Operations(run)
        self._driver = AsyncDriver(url, self._operations, retry_s)
        self.stats = self._driver.stats
        self._acknowledged: dict[str, int] = {}

    async def aclose(self) -> None:
        """Close the connections. Nothing on the server changes; a later call reconnects."""
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
        return await self._driver.run(self._operations.create(config, settings, weights))

    async def config(self) -> RunConfig:
        return await self._driver.run(self._operations.config())

    async def settings(self) -> dict[str, str]:
        return await self._driver.run(self._operations.settings())

    async def configure(self, changes: Mapping[str, str]) -> int:
        return await self._driver.run(self._operations.configure(changes))

    async def pause(self, reason: str = "by hand") -> None:
        await self._driver.run(self._operations.pause(reason))

    async def resume(self, reason: str = "by hand") -> None:
        await self._driver.run(self._operations.resume(reason))

    async def dead(self) -> list[DeadLetter]:
        return await self._driver.run(self._operations.dead())

    async def revive(self, ordinal: int, reason: str = "by hand") -> None:
        await self._driver.run(self._operations.revive(ordinal, reason))

    async def drain(self, worker: str, reason: str = "by hand") -> int:
        return await self._driver.run(self._operations.drain(worker, reason))

    async def drop(self, group: int, reason: str) -> Removal:
        return await self._driver.run(self._operations.drop(group, reason))

    async def filter(self, group: int, reason: str) -> Removal:
        return await self._driver.run(self._operations.filter(group, reason))

    async def reject(self, group: int, reason: str) -> Removal:
        return await self._driver.run(self._operations.reject(group, reason))

    async def status(self) -> Status:
        return await self._driver.run(self._operations.status())

    async def verify(self) -> list[str]:
        return await self._driver.run(self._operations.verify())

    # -- observing ----------------------------------------------------------------------------------

    async def audit(self, events: Iterable[Event] | None = None) -> Audit:
        return await self._driver.run(self._operations.audit(events))

    async def events(
        self, after: str = BEGINNING, *, known: int | None = None, wait_s: float = 0.0
    ) -> list[Event]:
        return await self._driver.run(self._operations.events(after, known, wait_s))

    async def newest_event(self, name: str | None) -> Event | None:
        return await self._driver.run(self._operations.newest_event(name))

    async def slots(self) -> list[SlotStatus]:
        return await self._driver.run(self._operations.slots())

    async def call_stats(self) -> dict[str, CallStats]:
        return await self._driver.run(self._operations.call_stats())

    async def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        return await self._driver.sleep(self._operations.wait(signal, timeout_s, batch))

    # -- workers ------------------------------------------------------------------------------------

    async def reserve(self, worker: str, version: int, limit: int) -> Grant:
        return await self._driver.run(self._operations.reserve(worker, version, limit))

    async def complete(self, reservation: Reservation, payload: Trajectory) -> Completion:
        return await self._driver.run(self._operations.complete(reservation, payload))

    async def complete_many(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> list[Completion | Refused]:
        return await self._driver.run(self._operations.complete_many(finished))

    async def group_trajectories(self, group: int) -> list[Trajectory]:
        return await self._driver.run(self._operations.group_trajectories(group))

    async def judge(
        self,
        reservation: Reservation,
        *,
        keep: bool = True,
        reason: str = "",
        advantages: Sequence[float] | None = None,
    ) -> Completion:
        return await self._driver.run(self._operations.judge(reservation, keep, reason, advantages))

    async def release(
        self, reservation: Reservation, prefix: Response | None = None, reason: str = "detach"
    ) -> Release:
        return await self._driver.run(self._operations.release(reservation, prefix, reason))

    async def fail(self, reservation: Reservation, error: str) -> Release:
        return await self._driver.run(self._operations.fail(reservation, error))

    async def save_prefix(self, reservation: Reservation, prefix: Response) -> None:
        await self._driver.run(self._operations.save_prefix(reservation, prefix))

    async def renew(
        self, worker: str, version: int | None = None, info: Mapping[str, object] | None = None
    ) -> Renewal:
        acknowledged = self._acknowledged.get(worker, 0)
        renewal = await self._driver.run(self._operations.renew(worker, version, info, acknowledged))
        self._acknowledged[worker] = renewal.acknowledge
        return renewal

    async def pin(self, worker: str, version: int | None = None) -> WeightsRef:
        return await self._driver.run(self._operations.pin(worker, version))

    async def leave(self, worker: str) -> None:
        await self._driver.run(self._operations.leave(worker))

    # -- the trainer --------------------------------------------------------------------------------

    async def take(self, trainer: str, version: int | None = None) -> Batch | None:
        return await self._driver.run(self._operations.take(trainer, version))

    async def trajectories(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
        return await self._driver.run(self._operations.trajectories(groups))

    async def encoded_trajectories(self, groups: Sequence[BatchGroup]) -> list[bytes]:

        return await self._driver.run(self._operations.encoded_trajectories(groups))

    async def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        await self._driver.run(self._operations.publish(version, weights, trainer, metrics))

    async def announce_sender(self, address: str, trainer: str) -> None:
        await self._driver.run(self._operations.announce_sender(address, trainer))

    async def checkpointed(self, version: int, trainer: str) -> None:
        await self._driver.run(self._operations.checkpointed(version, trainer))

    async def weights(self) -> list[WeightsRef]:
        return await self._driver.run(self._operations.weights())

    async def retire_weights(self, trainer: str, keep: int) -> list[WeightsRef]:
        return await self._driver.run(self._operations.retire_weights(trainer, keep))


for _name, _method in vars(Scheduler).items():
    if not _name.startswith("_") and hasattr(AsyncScheduler, _name):
        getattr(AsyncScheduler, _name).__doc__ = _method.__doc__
