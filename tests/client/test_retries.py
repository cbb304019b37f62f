"""A lost reply and a retry have one effect and the same answer; a lost library is loaded again."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.client import Pipeline

from roq import (
    AsyncScheduler,
    ConfigError,
    Fenced,
    Refused,
    RunConfig,
    Scheduler,
    ServerUnavailable,
    UnsuitableServer,
)
from roq.protocol.keys import keys_of
from roq.protocol.library import source, version
from tests.conftest import Server
from tests.protocol.play import trajectory
from tests.waiting import eventually

CONFIG = RunConfig(eta=1, batch_size=4, group_size=2)


def lose_replies(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """The server does its work, but the answer is lost on the way, so many times a call."""
    original = redis.Redis.execute_command
    lost: dict[Any, int] = {}

    def execute(self: redis.Redis, *args: Any, **options: Any) -> Any:
        answer = original(self, *args, **options)
        if args[0] == "FCALL" and lost.get(args, 0) < times:
            lost[args] = lost.get(args, 0) + 1
            raise redis.ConnectionError("the connection was cut after the server had answered")
        return answer

    monkeypatch.setattr(redis.Redis, "execute_command", execute)


@pytest.mark.parametrize("times", [1, 3])
def test_every_mutating_call_has_one_effect(
    sched: Scheduler, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    lose_replies(monkeypatch, times)
    assert sched.create(CONFIG) is False  # the retry confirms what the lost call created
    grant = sched.reserve("w0", 0, 9)
    assert len(grant.reservations) == 9
    status = sched.status()
    assert (status.inflight, status.ledger.issued) == (9, 5)
    by_group: dict[int, list[Any]] = {}
    for claim in grant.reservations:
        by_group.setdefault(claim.group, []).append(claim)
    done = [
        sched.complete(claim, trajectory(reward=claim.member)).status for claim in by_group[1] + by_group[2]
    ]
    assert done == ["open", "occupied", "open", "occupied"]
    assert sched.filter(1, "test").status == "filtered"
    assert sched.drop(3, "test").status == "requeued"
    assert sched.release(by_group[4][0]).status == "pending"
    for group in (4, 5):
        for claim in by_group[group]:
            if claim is not by_group[4][0]:
                sched.complete(claim, trajectory(reward=claim.member))
    again = sched.reserve("w0", 0, 4).reservations
    assert {(claim.group, claim.member) for claim in again[:2]} == {(4, 1), (5, 2)}
    for claim in again:
        sched.complete(claim, trajectory(reward=claim.member))
    batch = sched.take("t0")
    assert batch is not None
    sched.publish(1, "w/1", "t0")
    sched.checkpointed(1, "t0")
    sched.leave("w0")
    monkeypatch.undo()
    assert sched.verify() == []
    status = sched.status()
    assert status.version == 1
    assert status.ledger.balanced
    assert (status.ledger.trained, status.ledger.filtered) == (4, 1)


def test_completions_in_a_batch(sched: Scheduler, server: Server) -> None:
    sched.create(RunConfig(eta=1, batch_size=50))
    claims = sched.reserve("w0", 0, 80).reservations
    sched.release(claims[3])
    server.redis.execute_command("FUNCTION", "FLUSH")
    answers = sched.complete_many([(claim, trajectory()) for claim in claims])
    assert isinstance(answers[3], Fenced)
    assert [a.status for a in answers if not isinstance(a, Refused)] == ["occupied"] * 79
    assert sched.verify() == []
    assert sched.complete_many([]) == []


def test_a_batch_whose_replies_are_lost_has_one_effect(
    sched: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sched.create(RunConfig(eta=1, batch_size=50, group_size=2))
    claims = sched.reserve("w0", 0, 80).reservations
    original = Pipeline.execute
    lost: list[bool] = []

    def execute(self: Pipeline, raise_on_error: bool = True) -> Any:
        answers = original(self, raise_on_error)
        if len(lost) < 3:
            lost.append(True)
            raise redis.ConnectionError("the connection was cut after the server had answered")
        return answers

    monkeypatch.setattr(Pipeline, "execute", execute)
    answers = sched.complete_many([(claim, trajectory()) for claim in claims])
    assert len(lost) == 3
    assert [a.status for a in answers if not isinstance(a, Refused)] == ["open", "occupied"] * 40
    assert sched.verify() == []
    assert sched.audit().problems == []


async def test_async_completions_in_a_batch(server: Server) -> None:
    async with AsyncScheduler(server.url, "test") as sched:
        await sched.create(RunConfig(eta=1, batch_size=50))
        claims = (await sched.reserve("w0", 0, 90)).reservations
        await sched.release(claims[3])
        halves = await asyncio.gather(
            *(sched.complete_many([(c, trajectory()) for c in some]) for some in (claims[:45], claims[45:]))
        )
        answers = [answer for some in halves for answer in some]
        assert isinstance(answers[3], Fenced)
        assert sum(not isinstance(answer, Refused) for answer in answers) == 89
        assert await sched.verify() == []


def test_a_call_overtaken_on_its_lane_does_nothing(sched: Scheduler, server: Server) -> None:
    sched.create(CONFIG)
    keys = list(keys_of(sched.run).values())

    def reserve(sequence: int) -> Any:
        request = f"client 1 {sequence}"
        return server.redis.execute_command("FCALL", "roq_reserve", len(keys), *keys, request, "w0", 0, 1)

    first = reserve(1)
    assert reserve(1) == first
    assert reserve(2) != first
    with pytest.raises(redis.ResponseError, match="ROQ_FENCED"):
        reserve(1)
    assert sched.status().inflight == 2


def test_replies_do_not_pile_up(sched: Scheduler, server: Server) -> None:
    sched.create(RunConfig(eta=1, batch_size=50))
    for _ in range(100):
        sched.reserve("w0", 0, 1)
    assert server.redis.hlen(keys_of(sched.run)["replies"]) == 1
    assert server.redis.zcard(keys_of(sched.run)["clients"]) == 1


def test_a_lost_library_is_loaded_again(sched: Scheduler, server: Server) -> None:
    sched.create(CONFIG)
    server.redis.execute_command("FUNCTION", "FLUSH")
    assert len(sched.reserve("w0", 0, 1).reservations) == 1


def test_library_version(sched: Scheduler, server: Server) -> None:
    sched.create(CONFIG)
    assert server.redis.execute_command("FCALL_RO", "roq_version", 0).decode() == version()
    newer = source().replace(version(), "999 abc")
    server.redis.execute_command("FUNCTION", "LOAD", "REPLACE", newer)
    with (
        Scheduler(server.url, "test") as client,
        pytest.raises(UnsuitableServer, match=f"999 abc.*{version()}"),
    ):
        client.status()
    older = source().replace(version(), "0 abc")
    server.redis.execute_command("FUNCTION", "LOAD", "REPLACE", older)
    with Scheduler(server.url, "test") as client:
        client.status()
    assert server.redis.execute_command("FCALL_RO", "roq_version", 0).decode() == version()


def test_server_away_then_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server("valkey", tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    try:
        with Scheduler(server.url, "test", retry_s=30) as sched:
            sched.create(CONFIG)
            held = sched.reserve("w0", 0, 2).reservations
            server.kill()

            def back_when_missed() -> None:
                """A retry is reported from half a second on, and when there is one is left to chance."""
                eventually(lambda: str(server.socket) in caplog.text)
                server.start()

            back = threading.Thread(target=back_when_missed)
            back.start()
            assert sched.complete(held[0], trajectory()).status == "open"
            assert sched.verify() == []
            back.join()
    finally:
        server.kill()


def test_waiting_outlives_a_restart(tmp_path: Path) -> None:
    server = Server("valkey", tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    try:
        with Scheduler(server.url, "test", retry_s=30) as sched:
            sched.create(CONFIG)

            def outage() -> None:
                server.kill()
                time.sleep(0.5)
                server.start()
                with Scheduler(server.url, "test") as other:
                    other.pause()

            timer = threading.Timer(0.3, outage)
            timer.start()
            assert sched.wait(0, 20) == 1
            timer.join()
    finally:
        server.kill()


def test_server_stays_away(tmp_path: Path) -> None:
    with (
        Scheduler(f"unix://{tmp_path}/none.sock", "test", retry_s=0.3) as sched,
        pytest.raises(ServerUnavailable, match=r"none\.sock"),
    ):
        sched.status()


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "http://x",
        "redis://h:port",
        "redis+sentinel://h",
        "redis+cluster://h:x",
        "redis+ring://h",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    for client in (Scheduler, AsyncScheduler):
        with pytest.raises(ConfigError, match="Redis URL"):
            client(url, "test")


async def test_async_client_loses_nothing_when_a_call_is_cancelled(server: Server) -> None:
    async with AsyncScheduler(server.url, "test") as sched:
        await sched.create(RunConfig(eta=1, batch_size=50))
        for _ in range(30):
            task = asyncio.create_task(sched.reserve("w0", 0, 1))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        answers = await asyncio.gather(*(sched.reserve("w1", 0, 1) for _ in range(20)))
        claims = [r for grant in answers for r in grant.reservations]
        assert len({r.token for r in claims}) == 20  # no answer went to another call
        assert all(r.worker == "w1" for r in claims)
        await sched.leave("w0")
        assert await sched.verify() == []


async def test_async_errors(server: Server) -> None:
    async with AsyncScheduler(server.url, "test") as sched:
        await sched.create(CONFIG)
        first = (await sched.reserve("w0", 0, 1)).reservations[0]
        await sched.release(first)
        with pytest.raises(Fenced):
            await sched.complete(first, trajectory())


def test_a_wait_for_the_server_can_be_ended(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with (
        Scheduler(f"unix://{tmp_path}/nothing.sock", "test", retry_s=None, stop=stop) as sched,
        pytest.raises(ServerUnavailable),
    ):
        sched.status()
    assert 0.3 <= time.monotonic() - began < 5
