"""The asynchronous client: the methods of :class:`roq.Scheduler`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import tenacity
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from roq import _functions, _library
from roq._connect import companions, connect_async
from roq._operations import Call, Command, Many, Operation, Operations
from roq._session import (
    BLOCK_S,
    FAILURES,
    LANES,
    LIBRARY_MISSING,
    Lanes,
    Stats,
    Timed,
    check_version,
    is_transient,
    replace_library,
    retry_policy,
    translate,
    unanswered,
    who_may,
    wire,
    without_load,
)
from roq.audit import Audit
from roq.config import RunConfig
from roq.errors import Refused, RoqError
from roq.history import BEGINNING, Event
from roq.trajectory import Prefix, Trajectory
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

T = TypeVar("T")


class AsyncScheduler:
    """A run on a Redis server, for asyncio. Arguments, results and errors are those of ``Scheduler``.

    It belongs to the event loop in which it is first used, until ``aclose``.
    """

    def __init__(self, url: str, run: str, *, retry_s: float | None = 60.0) -> None:
        self.url = url
        self.run = run
        self.stats = Stats()
        self._operations = Operations(run)
        self._lanes = Lanes()
        self._policy = lambda: retry_policy(url, retry_s)
        self._acknowledged: dict[str, int] = {}
        self._checked = False
        self._redis: Any = connect_async(url)
        self._belong_to(None)

    def _belong_to(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._concurrency = asyncio.Semaphore(LANES)
        self._batching = asyncio.Lock()

    def _check_loop(self) -> None:
        """Connections belong to the event loop that they were made in."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._belong_to(loop)
        elif self._loop is not loop:
            raise RoqError(
                "this AsyncScheduler was used in another event loop, and its connections belong to that one; "
                "make one inside each asyncio.run, or await aclose() at the end of the first"
            )

    async def aclose(self) -> None:
        """Close the connections. Nothing on the server changes; a later call connects anew."""
        for client in (self._redis, *companions(self._redis)):
            await client.aclose()
        self._belong_to(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- the wire -----------------------------------------------------------------------------------

    async def _ensure_library(self) -> None:
        check_version(await self._redis.info("server"))
        version = wire(self._operations, Call(_functions.VERSION, ()), "")
        loaded: str | None = None
        try:
            loaded = (await self._redis.execute_command(*version)).decode()
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                await self._redis.function_load(_library.source(), replace=True)
            except NoPermissionError:
                without_load(loaded)
        self._checked = True

    async def _exchange(self, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            await self._ensure_library()
        try:
            return await self._redis.execute_command(*args)
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        await self._ensure_library()
        return await self._redis.execute_command(*args)

    async def _exchange_many(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            await self._ensure_library()
        async with self._redis.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = await pipe.execute(raise_on_error=False)
        failure = unanswered(answers)
        if failure is not None:
            self._checked = False  # the library may be what is missing
            raise RedisConnectionError(f"not all calls were answered: {failure}")
        return answers

    async def _persist(self, exchange: Callable[[Any], Awaitable[T]], what: Any) -> T:
        """Exchange, and again while the failure is one that passes."""
        self._check_loop()
        try:
            return await exchange(what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return await tenacity.AsyncRetrying(**self._policy())(exchange, what)

    async def _send(self, command: Call | Many | Command) -> Any:
        self._check_loop()  # before the semaphore, which belongs to a loop too
        if isinstance(command, Many):
            async with self._batching:
                with self._lanes.hold(len(command.calls)) as requests:
                    calls = zip(command.calls, requests, strict=True)
                    many = [wire(self._operations, call, request) for call, request in calls]
                    return await self._persist(self._exchange_many, many)
        async with self._concurrency:
            with self._lanes.hold() as (request,):
                return await self._persist(self._exchange, wire(self._operations, command, request))

    async def _drive(self, operation: Operation[T]) -> T:
        """Send what an operation yields, with retries, until it returns."""
        answer: Any = None
        command: Call | Many | Command | None = None
        with self.stats.count():
            try:
                while True:
                    command = operation.send(answer)
                    answer = await self._send(command)
            except StopIteration as done:
                return done.value
            except FAILURES as error:
                raise translate(error, self.url, who_may(command)) from error

    async def _run(self, operation: Operation[T]) -> T:
        return await Timed(self._drive(operation), self.stats)

    # -- the run ------------------------------------------------------------------------------------

    async def create(
        self, config: RunConfig, *, settings: Mapping[str, str] | None = None, weights: str | None = None
    ) -> bool:
        """As :meth:`Scheduler.create`."""
        return await self._run(self._operations.create(config, settings, weights))

    async def config(self) -> RunConfig:
        """As :meth:`Scheduler.config`."""
        return await self._run(self._operations.config())

    async def settings(self) -> dict[str, str]:
        """As :meth:`Scheduler.settings`."""
        return await self._run(self._operations.settings())

    async def pause(self, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.pause`."""
        await self._run(self._operations.pause(True, reason))

    async def resume(self, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.resume`."""
        await self._run(self._operations.pause(False, reason))

    async def dead(self) -> list[DeadLetter]:
        """As :meth:`Scheduler.dead`."""
        return await self._run(self._operations.dead())

    async def revive(self, ordinal: int, reason: str = "by hand") -> None:
        """As :meth:`Scheduler.revive`."""
        await self._run(self._operations.revive(ordinal, reason))

    async def status(self) -> Status:
        """As :meth:`Scheduler.status`."""
        return await self._run(self._operations.status())

    async def verify(self) -> list[str]:
        """As :meth:`Scheduler.verify`."""
        return await self._run(self._operations.verify())

    async def audit(self, events: Iterable[Event] | None = None) -> Audit:
        """As :meth:`Scheduler.audit`."""
        return await self._run(self._operations.audit(events))

    async def events(
        self, after: str = BEGINNING, *, known: int | None = None, wait_s: float = 0.0
    ) -> list[Event]:
        """As :meth:`Scheduler.events`."""
        return await self._run(self._operations.events(after, known, min(wait_s, BLOCK_S)))

    async def newest_event(self, name: str | None) -> Event | None:
        """As :meth:`Scheduler.newest_event`."""
        return await self._run(self._operations.newest_event(name))

    async def call_stats(self) -> dict[str, CallStats]:
        """As :meth:`Scheduler.call_stats`."""
        return await self._run(self._operations.call_stats())

    async def slots(self) -> list[SlotStatus]:
        """As :meth:`Scheduler.slots`."""
        return await self._run(self._operations.slots())

    async def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        """As :meth:`Scheduler.wait`."""
        keys = self._operations.keys
        stream, field = ("ready", "ready_signal") if batch else ("signals", "signal")
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                block = max(1, round(min(left, BLOCK_S) * 1000))
                read = ("XREAD", "BLOCK", block, "STREAMS", keys[stream], f"{signal}-0")
                if await self._persist(self._exchange, read):
                    newest = ("HGET", keys["state"], field)
                    return int(await self._persist(self._exchange, newest))
        except FAILURES as error:
            raise translate(error, self.url) from error
        return signal

    # -- workers ------------------------------------------------------------------------------------

    async def reserve(self, worker: str, version: int, limit: int) -> Grant:
        """As :meth:`Scheduler.reserve`."""
        return await self._run(self._operations.reserve(worker, version, limit))

    async def complete(self, reservation: Reservation, payload: Trajectory) -> Completion:
        """As :meth:`Scheduler.complete`."""
        return await self._run(self._operations.complete(reservation, payload))

    async def complete_many(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> list[Completion | Refused]:
        """As :meth:`Scheduler.complete_many`."""
        return await self._run(self._operations.complete_many(finished))

    async def members(self, group: int) -> list[Trajectory]:
        """As :meth:`Scheduler.members`."""
        return await self._run(self._operations.members(group))

    async def finish(
        self,
        reservation: Reservation,
        *,
        keep: bool = True,
        reason: str = "",
        advantages: Sequence[float] | None = None,
    ) -> Completion:
        """As :meth:`Scheduler.finish`."""
        return await self._run(self._operations.finish(reservation, keep, reason, advantages))

    async def release(
        self,
        reservation: Reservation,
        prefix: Prefix | None = None,
        reason: str = "detach",
        error: str | None = None,
    ) -> Release:
        """As :meth:`Scheduler.release`."""
        return await self._run(self._operations.release(reservation, prefix, reason, error))

    async def save_prefix(self, reservation: Reservation, prefix: Prefix) -> None:
        """As :meth:`Scheduler.save_prefix`."""
        await self._run(self._operations.save_prefix(reservation, prefix))

    async def renew(
        self, worker: str, version: int | None = None, info: Mapping[str, object] | None = None
    ) -> Renewal:
        """As :meth:`Scheduler.renew`."""
        acknowledged = self._acknowledged.get(worker, 0)
        renewal = await self._run(self._operations.renew(worker, version, info, acknowledged))
        self._acknowledged[worker] = renewal.acknowledge
        return renewal

    async def drain(self, worker: str, reason: str = "by hand") -> int:
        """As :meth:`Scheduler.drain`."""
        return await self._run(self._operations.drain(worker, reason))

    async def leave(self, worker: str) -> None:
        """As :meth:`Scheduler.leave`."""
        await self._run(self._operations.leave(worker))

    async def pin(self, worker: str, version: int | None = None) -> WeightsRef:
        """As :meth:`Scheduler.pin`."""
        return await self._run(self._operations.pin(worker, version))

    async def drop(self, group: int, reason: str) -> Removal:
        """As :meth:`Scheduler.drop`."""
        return await self._run(self._operations.drop(group, reason))

    async def filter(self, group: int, reason: str) -> Removal:
        """As :meth:`Scheduler.filter`."""
        return await self._run(self._operations.filter(group, reason))

    # -- the trainer --------------------------------------------------------------------------------

    async def take(self, trainer: str, version: int | None = None) -> Batch | None:
        """As :meth:`Scheduler.take`."""
        return await self._run(self._operations.take(trainer, version))

    async def payloads(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
        """As :meth:`Scheduler.payloads`."""
        return await self._run(self._operations.payloads(groups))

    async def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """As :meth:`Scheduler.publish`."""
        await self._run(self._operations.publish(version, weights, trainer, metrics))

    async def serve(self, address: str, trainer: str) -> None:
        """As :meth:`Scheduler.serve`."""
        await self._run(self._operations.serve(address, trainer))

    async def checkpointed(self, version: int, trainer: str) -> None:
        """As :meth:`Scheduler.checkpointed`."""
        await self._run(self._operations.checkpointed(version, trainer))

    async def weights(self) -> list[WeightsRef]:
        """As :meth:`Scheduler.weights`."""
        return await self._run(self._operations.weights())

    async def retire_weights(self, trainer: str, keep: int) -> list[WeightsRef]:
        """As :meth:`Scheduler.retire_weights`."""
        return await self._run(self._operations.retire_weights(trainer, keep))
