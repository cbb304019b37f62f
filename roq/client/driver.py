"""Drive the operations of a scheduler: send each step to the server, with retries.

The blocking and the asyncio driver have the same methods, in the same order. :mod:`roq.client.failures`
classifies failures for both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
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
    is_misled,
    is_transient,
    lost_node,
    replace_library,
    retry_policy,
    roles_of,
    translate,
)
from roq.client.forks import renew_in_children
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
        self._policy = lambda: retry_policy(url, retry_s, stop)
        self._checked = False
        check_url(url)
        self._inherited: list[Any] = []
        self._client: Any = None
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Begin with new locks and no client; that of a parent is kept, since closing it takes its locks."""
        if self._client is not None:
            self._inherited.append(self._client)
        self._client = None
        self._connecting = threading.Lock()
        self._users = Users()
        self._concurrency = threading.BoundedSemaphore(LANES)
        self._batching = threading.Lock()

    @property
    def redis(self) -> Any:
        """The redis-py client, made on first use: one for a cluster connects at once."""
        with self._connecting:
            if self._client is None:
                self._client = connect(self.url)
            return self._client

    @contextmanager
    def _borrow(self) -> Generator[Any]:
        """The client, for one attempt. If it leads to the wrong server, the next attempt gets a new one; the
        old one's last user closes it."""
        client = self.redis
        self._users.add(client)
        try:
            yield client
        except FAILURES as error:
            with self._connecting:
                if is_misled(error) and self._client is client:
                    self._client = None
            raise
        finally:
            if self._users.remove(client) and client is not self._client:
                _close(client)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            _close(self._client)

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

    def _persist(self, exchange: Callable[[Any, Any], T], what: Any) -> T:
        """Exchange, and retry while the failure is transient."""
        try:
            return self._attempt(exchange, what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return tenacity.Retrying(**self._policy())(self._attempt, exchange, what)

    def _attempt(self, exchange: Callable[[Any, Any], T], what: Any) -> T:
        with self._borrow() as client:
            try:
                return exchange(client, what)
            except AttributeError as error:
                lost = lost_node(error)
                if lost is None:
                    raise
                raise lost from error

    def _exchange(self, client: Any, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            self._ensure_library(client)
        try:
            return client.execute_command(*args)
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        self._ensure_library(client)
        return client.execute_command(*args)

    def _exchange_many(self, client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            self._ensure_library(client)
        with client.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = pipe.execute(raise_on_error=False)
        failure = first_failure(answers)
        if failure is not None:
            self._checked = False  # the library may be missing
            if is_transient(failure):
                raise failure
            raise RedisConnectionError(f"not all calls were answered: {failure}")
        return answers

    def _ensure_library(self, client: Any) -> None:
        check_version(client.info("server"))
        version = self._operations.wire(Call(functions.VERSION, ()))
        loaded: str | None = None
        try:
            loaded = client.execute_command(*version).decode()
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                client.function_load(library.source(), replace=True)
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
        self._users = Users()
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
        await _aclose(self.redis)
        self._belong_to(None)

    @asynccontextmanager
    async def _borrow(self) -> AsyncGenerator[Any]:
        """The client, for one attempt. If it leads to the wrong server, the next attempt gets a new one; the
        old one's last user closes it."""
        client = self.redis
        self._users.add(client)
        try:
            yield client
        except FAILURES as error:
            if is_misled(error) and self.redis is client:
                self.redis = connect_async(self.url)
            raise
        finally:
            if self._users.remove(client) and client is not self.redis:
                await _aclose(client)

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

    async def _persist(self, exchange: Callable[[Any, Any], Awaitable[T]], what: Any) -> T:
        """Exchange, and retry while the failure is transient."""
        self._check_loop()
        try:
            return await self._attempt(exchange, what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return await tenacity.AsyncRetrying(**self._policy())(self._attempt, exchange, what)

    async def _attempt(self, exchange: Callable[[Any, Any], Awaitable[T]], what: Any) -> T:
        async with self._borrow() as client:
            try:
                return await exchange(client, what)
            except AttributeError as error:
                lost = lost_node(error)
                if lost is None:
                    raise
                raise lost from error

    async def _exchange(self, client: Any, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            await self._ensure_library(client)
        try:
            return await client.execute_command(*args)
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        await self._ensure_library(client)
        return await client.execute_command(*args)

    async def _exchange_many(self, client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            await self._ensure_library(client)
        async with client.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = await pipe.execute(raise_on_error=False)
        failure = first_failure(answers)
        if failure is not None:
            self._checked = False  # the library may be missing
            if is_transient(failure):
                raise failure
            raise RedisConnectionError(f"not all calls were answered: {failure}")
        return answers

    async def _ensure_library(self, client: Any) -> None:
        check_version(await client.info("server"))
        version = self._operations.wire(Call(functions.VERSION, ()))
        loaded: str | None = None
        try:
            loaded = (await client.execute_command(*version)).decode()
        except ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                await client.function_load(library.source(), replace=True)
            except NoPermissionError:
                accept_foreign_library(loaded)
        self._checked = True


class Users:
    """Counts the attempts that use each client."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def add(self, client: Any) -> None:
        with self._lock:
            self._counts[client] += 1

    def remove(self, client: Any) -> bool:
        """True if this was the client's last user."""
        with self._lock:
            self._counts[client] -= 1
            if self._counts[client]:
                return False
            del self._counts[client]
            return True


def _close(client: Any) -> None:
    for one in (client, *sentinels_of(client)):
        one.close()


async def _aclose(client: Any) -> None:
    for one in (client, *sentinels_of(client)):
        await one.aclose()
