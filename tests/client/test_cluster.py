"""Roles, export and import in a Redis Cluster: users are made on each node, a run is on one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from roq import NotAllowed, RunConfig, Scheduler
from roq.admin.backup import export_run, import_run
from roq.admin.doctor import examine
from roq.board.feed import RunFeed
from roq.protocol.keys import keys_of
from tests.conftest import Server
from tests.ports import free_ports
from tests.protocol.play import direct, trajectory
from tests.users import make_users

RUNS = ("a", "b", "c", "d")  # on both nodes


@pytest.fixture(params=["valkey", "redis"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a cluster of two masters, and the folder of its users' passwords."""
    nodes: list[Server] = []
    ports = free_ports(2)
    try:
        for i, port in enumerate(ports):
            folder = tmp_path / str(i)
            folder.mkdir()
            options = ("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
            nodes.append(Server(request.param, folder, *options))
        for node, (first, last) in zip(nodes, ((0, 8191), (8192, 16383)), strict=True):
            node.redis.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            make_users(node, tmp_path, *RUNS)
        nodes[0].redis.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1])
        deadline = time.monotonic() + 20
        while any(b"cluster_state:ok" not in state(node) for node in nodes):
            assert time.monotonic() < deadline, [state(node) for node in nodes]
            time.sleep(0.05)
        yield f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", tmp_path
        assert all(node.redis.dbsize() > 0 for node in nodes), "the runs were on both"
    finally:
        for node in nodes:
            node.kill()


def state(node: Server) -> bytes:
    return node.redis.execute_command("CLUSTER", "INFO", NEVER_DECODE=True)


def test_roles_and_backups(cluster: tuple[str, Path]) -> None:
    url, folder = cluster

    def url_of(role: str) -> str:
        return f"{url}?username=roq-{role}&password_file={folder / role}"

    for run in RUNS:
        with (
            Scheduler(url_of("admin"), run) as admin,
            Scheduler(url_of("worker"), run) as worker,
            Scheduler(url_of("trainer"), run) as trainer,
        ):
            admin.create(RunConfig(eta=1, batch_size=2), weights="w")
            finished = [(claim, trajectory()) for claim in worker.reserve("w0", 0, 3).reservations]
            worker.complete_many(finished)
            with pytest.raises(NotAllowed):
                worker.publish(1, "w", "t0")
            batch = trainer.take("t0")
            assert batch is not None
            assert len(trainer.trajectories(batch.groups)) == 2
            export_run(url_of("admin"), run, folder / f"{run}.roq")
            before = admin.status()
            trainer.publish(1, "w", "t0")
            with direct(admin) as client:
                client.delete(*keys_of(run).values())
            import_run(url_of("admin"), folder / f"{run}.roq")
            assert admin.verify() == []
            assert admin.status().ledger == before.ledger
            trainer.publish(1, "w", "t0")
    lines = {line.name: line for line in examine(url_of("board"), "a", None)}
    assert lines["run"].state == "ok"
    assert lines["user"].text == "roq-board, with the rights of role board"
    for run in RUNS:
        assert asyncio.run(board_of(url_of("board"), run)) == 1


async def board_of(url: str, run: str) -> int:
    """The version in a board's look at the whole run."""
    feed = RunFeed(url, run)
    try:
        _, look = await feed._look_at_once()
    finally:
        await feed.stop()
    return look.number("version")


def test_calls_while_a_slot_migrates(cluster: tuple[str, Path]) -> None:
    url, _ = cluster
    ports = [int(node.rpartition(":")[2]) for node in url.partition("//")[2].split(",")]
    with (
        ExitStack() as stack,
        Scheduler(url, "a", retry_s=20) as sched,
    ):
        for run in RUNS:
            stack.enter_context(Scheduler(url, run)).create(RunConfig(eta=1, batch_size=8))
        new, old = (stack.enter_context(redis.Redis(port=port)) for port in ports)  # "a" is on the second
        claims = sched.reserve("w0", 0, 4).reservations
        slot = old.execute_command("CLUSTER", "KEYSLOT", keys_of("a")["state"])
        ids = {node: node.execute_command("CLUSTER", "MYID").decode() for node in (new, old)}
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])

        def migrate(most: int) -> bool:
            keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, most)
            if keys:
                old.execute_command("MIGRATE", "127.0.0.1", ports[0], "", 0, 5000, "KEYS", *keys)
            return bool(keys)

        assert migrate(4)
        with ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(sched.complete_many, [(claim, trajectory()) for claim in claims[1:]]),
                pool.submit(lambda: [sched.complete(claims[0], trajectory())]),
                pool.submit(lambda: [sched.status()]),
                pool.submit(lambda: [sched.wait(10**6, 3)]),
            ]
            assert wait(calls[:3], timeout=1.5).done == set()  # redis-py gives up after a second
            while migrate(50):
                pass
            for node in (new, old):
                node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
            answers = [call.result(30) for call in calls]
        assert [answer.status for answer in answers[0] + answers[1]] == ["occupied"] * 4  # type: ignore[union-attr]
        assert answers[3] == [10**6]
        assert sched.verify() == []
        assert sched.audit().problems == []
