"""A client in threads, forks and event loops, and which of its errors pass."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import pytest
from redis import exceptions

from roq import AsyncScheduler, RoqError, RunConfig, Scheduler, ServerUnavailable
from roq.client.failures import is_misled, is_transient, lost_node, translate
from roq.client.lanes import LANES
from tests.conftest import Server

CONFIG = RunConfig(eta=1, batch_size=2, prompts=8)


def test_a_second_event_loop(server: Server) -> None:
    sched = AsyncScheduler(server.url, "test", retry_s=1)

    async def use(close: bool) -> None:
        await sched.create(CONFIG)
        await asyncio.gather(*(sched.status() for _ in range(100)))
        assert await sched.wait(0, 0.01) >= 0
        if close:
            await sched.aclose()

    asyncio.run(use(close=True))
    asyncio.run(use(close=True))  # closed, it is as new

    async def in_another_loop() -> None:
        await use(close=False)
        for call in (sched.status, lambda: sched.wait(0, 0.01)):
            with pytest.raises(RoqError, match=r"aclose\(\)"):
                await asyncio.to_thread(asyncio.run, call())
        await sched.aclose()

    asyncio.run(in_another_loop())


def _reserve(sched: Scheduler, out: Any) -> None:
    out.put([claim.token for claim in sched.reserve(f"w{os.getpid()}", 0, 2).reservations])


def test_a_fork_is_another_client(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=64))
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    children = [context.Process(target=_reserve, args=(sched, out)) for _ in range(2)]
    for child in children:
        child.start()
    tokens = [token for _ in children for token in out.get(timeout=20)]
    for child in children:
        child.join()
    tokens += [claim.token for claim in sched.reserve("parent", 0, 2).reservations]
    assert len(set(tokens)) == 6


def test_a_fork_does_not_wait_for_threads_of_its_parent(sched: Scheduler) -> None:
    """The child is forked while another thread holds each lock of the client."""
    sched.create(RunConfig(eta=1, batch_size=64))
    driver: Any = sched._driver
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        locks = (
            driver._connecting,
            driver._batching,
            driver._lanes._lock,
            driver.stats._lock,
            driver._users._lock,
        )
        with ExitStack() as stack:
            for lock in (*locks, *[driver._concurrency] * LANES):
                stack.enter_context(lock)
            held.set()
            forked.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=_reserve, args=(sched, out))
    child.start()
    try:
        assert len(out.get(timeout=20)) == 2
    finally:
        child.kill()
        child.join(10)
        forked.set()
        thread.join(10)
    assert len(sched.reserve("parent", 0, 2).reservations) == 2


def test_more_waits_than_connections_of_redis_py(sched: Scheduler) -> None:
    sched.create(CONFIG)
    with ThreadPoolExecutor(120) as pool:  # redis-py's default is 100
        waits = [pool.submit(sched.wait, 10**6, 3) for _ in range(120)]
        assert [wait.result(60) for wait in waits] == [10**6] * 120


WRONG_SERVER = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN", "LOADING", "CLUSTERDOWN", "TRYAGAIN")


@pytest.mark.parametrize("code", ["BUSY", "MISCONF", "OOM", *WRONG_SERVER])
def test_errors_that_pass(code: str) -> None:
    error = exceptions.ResponseError(f"{code} the server cannot now")
    assert is_transient(error)
    assert is_misled(error) == (code in WRONG_SERVER)
    assert isinstance(translate(error, "redis://h"), ServerUnavailable)
    assert not is_transient(exceptions.ResponseError("WRONGTYPE it never will"))


@pytest.mark.parametrize(
    "kind",
    [
        exceptions.ReadOnlyError,
        exceptions.BusyLoadingError,
        exceptions.TryAgainError,
        exceptions.ClusterError,
        exceptions.ClusterDownError,
        exceptions.MasterDownError,
    ],
)
def test_errors_that_redis_py_has_a_class_for(kind: type[Exception]) -> None:
    error = kind.__new__(kind, "without the server's code")
    assert is_transient(error)
    assert is_misled(error)


def test_only_an_error_inside_redis_py_is_a_lost_node() -> None:
    def ask(node: Any) -> Any:
        return node.redis_connection

    inside = FunctionType(ask.__code__, {"__name__": "redis.cluster"})
    for function, lost in ((inside, True), (ask, False)):
        with pytest.raises(AttributeError) as error:
            function(None)
        found = lost_node(error.value)
        assert (found is not None) is lost
        assert found is None or is_misled(found)
