"""A client in threads, forks and event loops, and which of its errors pass."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from types import FunctionType
from typing import Any

import pytest
from redis import exceptions

from roq import AsyncScheduler, RoqError, RunConfig, Scheduler, ServerUnavailable
from roq.client.failures import is_misled, is_transient, lost_node, translate
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
