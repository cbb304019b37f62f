"""Drive the operations of a scheduler: send each step to the server, with retries.

The blocking and the asyncio driver have the same methods, in the same order. :mod:`roq.client.failures`
classifies failures for both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import tenacity
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from roq.client.connect import check_url, connect, connect_async, sentinels_of
from roq.client.failures import (
    FAILURES,
    LIBRARY_MISSING,
    accept_foreign_library,
    check_version,
    first_failure,
    is_transient,
    replace_library,
    retry_policy,
    roles_of,
    translate,
)
from roq.client.lanes import LANES, Lanes
from roq.client.operations import Call, Command, Many, Operation, Operations
from roq.client.stats import Stats, Timed
from roq.errors import RoqError
from roq.protocol import functions, library

__all__ = ["AsyncDriver", "Driver"]

T = TypeVar("T")


class Driver:
    """Drives operations on one run. Safe to share between threads.

    Args: as for :class:`roq.Scheduler`.
    """

    def __init__(
        self, url: str, operations: Operations, retry_s: float | None, stop: threading.Event | None
    ) -> None:
        self.url = url
        self.stats = Stats()
        self._operations = operations
        self._lanes = Lanes()
        self._concurrency = threading.BoundedSemaphore(LANES)
        self._batching = threading.Lock()
        self._policy = lambda: retry_policy(url, retry_s, stop)
        self._checked = False
        check_url(url)
        self._client: Any = None
        self._connecting = threading.Lock()

    @property
    def redis(self) -> Any:
        """The redis-py client, made on first use: one for a cluster connects at once."""
        with self._connecting:
            if self._client is None:
                self._client = connect(self.url)
            return self._client

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            for client in (self._client, *sentinels_of(self._client)):
                client.close()

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its end and count the call."""
        started = time.perf_counter()
        with self.stats.count():
            try:
                return self._drive(operation, self._send)
            finally:
                self.stats.seconds += time.perf_counter() - started

    def sleep(self, operation: Operation[T]) -> T:
        """Drive an operation of blocking commands; it is not counted and does not delay other calls."""
        return self._drive(operation, lambda command: self._persist(self._exchange, command.args))

    def _drive(self, operation: Operation[T], send: Callable[[Any], Any]) -> T:
        answer: Any = None
        command: Call | Many | Command | None = None
        try:
            while True:
                command = operation.send(answer)
                answer = send(command)
        except StopIteration as done:
            return done.value
        except FAILURES as error:
            raise translate(error, self.url, roles_of(command)) from error

    def _send(self, command: Call | Many | Command) -> Any:
        if isinstance(command, Many):
            with self._batching, self._lanes.hold(len(command.calls)) as requests:
                calls = zip(command.calls, requests, strict=True)
                many = [self._operations.wire(call, request) for call, request in calls]
                return self._persist(self._exchange_many, many)
        with self._concurrency, self._lanes.hold() as (request,):
            return self._persist(self._exchange, self._operations.wire(command, request))

    def _persist(self, exchange: Callable[[Any], T], what: Any) -> T:
        """Exchange, and retry while the failure is transient."""
        try:
            return exchange(what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return tenacity.Retrying(**self._policy())(exchange, what)

    def _exchange(self, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            self._ensure_library()
        try:
            return self.redis.execute_command(*args)
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        self._ensure_library()
        return self.redis.execute_command(*args)

    def _exchange_many(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            self._ensure_library()
        with self.redis.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = pipe.execute(raise_on_error=False)
        failure = first_failure(answers)
        if failure is not None:
            self._checked = False  # the library may be missing
            raise RedisConnectionError(f"not all calls were answered: {failure}")
        return answers

    def _ensure_library(self) -> None:
        check_version(self.redis.info("server"))
        version = self._operations.wire(Call(functions.VERSION, ()))
        loaded: str | None = None
        try:
            loaded = self.redis.execute_command(*version).decode()
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                self.redis.function_load(library.source(), replace=True)
            except NoPermissionError:
                accept_foreign_library(loaded)
        self._checked = True


class AsyncDriver:
    """:class:`Driver`, awaited. It is bound to the event loop that first uses it, until ``close``."""

    def __init__(self, url: str, operations: Operations, retry_s: float | None) -> None:
        self.url = url
        self.stats = Stats()
        self.redis: Any = connect_async(url)
        self._operations = operations
        self._lanes = Lanes()
        self._policy = lambda: retry_policy(url, retry_s)
        self._checked = False
        self._belong_to(None)

    def _belong_to(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._concurrency = asyncio.Semaphore(LANES)
        self._batching = asyncio.Lock()

    def _check_loop(self) -> None:
        """Refuse a second event loop: connections work only in the loop that made them."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._belong_to(loop)
        elif self._loop is not loop:
            raise RoqError(
                "this AsyncScheduler is bound to another event loop; "
                "make one inside each asyncio.run, or await aclose() at the end of the first"
            )

    async def close(self) -> None:
        """Close the connections; a later call reconnects."""
        for client in (self.redis, *sentinels_of(self.redis)):
            await client.aclose()
        self._belong_to(None)

    async def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its end and count the call."""
        return await Timed(self._count(operation), self.stats)

    async def _count(self, operation: Operation[T]) -> T:
        with self.stats.count():
            return await self._drive(operation, self._send)

    async def sleep(self, operation: Operation[T]) -> T:
        """Drive an operation of blocking commands; it is not counted and does not delay other calls."""
        return await self._drive(operation, lambda command: self._persist(self._exchange, command.args))

    async def _drive(self, operation: Operation[T], send: Callable[[Any], Awaitable[Any]]) -> T:
        answer: Any = None
        command: Call | Many | Command | None = None
        try:
            while True:
                command = operation.send(answer)
                answer = await send(command)
        except StopIteration as done:
            return done.value
        except FAILURES as error:
            raise translate(error, self.url, roles_of(command)) from error

    async def _send(self, command: Call | Many | Command) -> Any:
        self._check_loop()  # before the semaphore, which belongs to a loop too
        if isinstance(command, Many):
            async with self._batching:
                with self._lanes.hold(len(command.calls)) as requests:
                    calls = zip(command.calls, requests, strict=True)
                    many = [self._operations.wire(call, request) for call, request in calls]
                    return await self._persist(self._exchange_many, many)
        async with self._concurrency:
            with self._lanes.hold() as (request,):
                return await self._persist(self._exchange, self._operations.wire(command, request))

    async def _persist(self, exchange: Callable[[Any], Awaitable[T]], what: Any) -> T:
        """Exchange, and retry while the failure is transient."""
        self._check_loop()
        try:
            return await exchange(what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return await tenacity.AsyncRetrying(**self._policy())(exchange, what)

    async def _exchange(self, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            await self._ensure_library()
        try:
            return await self.redis.execute_command(*args)
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        await self._ensure_library()
        return await self.redis.execute_command(*args)

    async def _exchange_many(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            await self._ensure_library()
        async with self.redis.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = await pipe.execute(raise_on_error=False)
        failure = first_failure(answers)
        if failure is not None:
            self._checked = False  # the library may be missing
            raise RedisConnectionError(f"not all calls were answered: {failure}")
        return answers

    async def _ensure_library(self) -> None:
        check_version(await self.redis.info("server"))
        version = self._operations.wire(Call(functions.VERSION, ()))
        loaded: str | None = None
        try:
            loaded = (await self.redis.execute_command(*version)).decode()
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                await self.redis.function_load(library.source(), replace=True)
            except NoPermissionError:
                accept_foreign_library(loaded)
        self._checked = True
