"""The same client over a Sentinel failover and a Redis Cluster failover, with calls going on."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from roq import AsyncScheduler, RunConfig, Scheduler, ServerUnavailable
from roq.admin.server import check_server, server_rss, wait_for_server
from roq.protocol.keys import keys_of
from tests.conftest import server_binary
from tests.ports import free_ports
from tests.protocol.play import direct, trajectory
from tests.waiting import until

pytestmark = pytest.mark.slow

CONFIG = RunConfig(eta=1, batch_size=4, lease_s=30)


class Fleet:
    """Redis processes on loopback ports."""

    def __init__(self, folder: Path, kind: str) -> None:
        binary = server_binary(kind)
        if binary is None:
            pytest.skip(f"no {kind} server on this machine")
        self.binary = str(binary)
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.clients: dict[int, redis.Redis] = {}

    def client(self, port: int) -> redis.Redis:
        return self.clients.setdefault(port, redis.Redis(port=port))

    def start(self, port: int, *options: str) -> redis.Redis:
        home = self.folder / str(port)
        home.mkdir()
        command = [self.binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
        command += ["--save", "", "--appendonly", "yes", *options]
        with (home / "log").open("wb") as log:
            self.processes[port] = subprocess.Popen(command, stdout=log, stderr=log)
        client = self.client(port)
        until(lambda: answers(client), f"the server on port {port}")
        return client

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait()

    def end(self) -> None:
        for client in self.clients.values():
            client.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture(params=["valkey", "redis"])
def sentinel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Fleet, int]]:
    """A master with a replica and one Sentinel: URL, processes, the master's port."""
    fleet = Fleet(tmp_path, request.param)
    master, replica, watcher = free_ports(3)
    try:
        fleet.start(master)
        second = fleet.start(replica, "--replicaof", "127.0.0.1", str(master))
        until(lambda: second.info("replication")["master_link_status"] == "up", "the replica")
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor roq 127.0.0.1 {master} 1\n"
            "sentinel down-after-milliseconds roq 500\n"
            "sentinel failover-timeout roq 5000\n"
        )
        home = tmp_path / "sentinel"
        home.mkdir()
        with (home / "log").open("wb") as log:
            fleet.processes[watcher] = subprocess.Popen(
                [fleet.binary, str(config), "--sentinel", "--port", str(watcher), "--dir", str(home)],
                stdout=log,
                stderr=log,
            )
        client = fleet.client(watcher)
        until(lambda: answers(client), "the Sentinel")
        until(lambda: client.sentinel_master("roq")["num-slaves"] == 1, "the Sentinel to find the replica")
        yield f"redis+sentinel://127.0.0.1:{watcher}/roq", fleet, master
    finally:
        fleet.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Fleet]]:
    """Three masters with a replica each."""
    if not shutil.which("redis-cli"):
        pytest.skip("no redis-cli on this machine, which sets up the cluster")
    fleet = Fleet(tmp_path, "redis")
    ports = free_ports(6)
    try:
        for port in ports:
            fleet.start(port, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        nodes = [f"127.0.0.1:{port}" for port in ports]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *nodes, "--cluster-replicas", "1", "--cluster-yes"],
            check=True,
            timeout=60,
            capture_output=True,
        )
        first = fleet.client(ports[0])
        until(lambda: b"cluster_state:ok" in _cluster_info(first), "the cluster")
        until(lambda: all(_link_up(fleet.client(port)) for port in ports), "the replicas")
        yield f"redis+cluster://{','.join(nodes[:3])}", fleet
    finally:
        fleet.end()


def _cluster_info(client: redis.Redis) -> bytes:
    return client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True)  # type: ignore[no-any-return]


def _link_up(client: redis.Redis) -> bool:
    info = client.info("replication")
    return info["role"] == "master" or info["master_link_status"] == "up"


def play(sched: Scheduler, steps: int, after: Callable[[int], None] = lambda _: None) -> None:
    """So many steps of a worker and a trainer, on from where the run is."""
    version = sched.status().version
    for step in range(steps):
        while (batch := sched.take("t0", version)) is None:
            claims = sched.reserve("w0", version, 4).reservations
            sched.complete_many([(claim, trajectory(version)) for claim in claims])
        assert len(sched.trajectories(batch.groups)) == 4
        version += 1
        sched.publish(version, f"w/{version}", "t0")
        after(step)
    sched.checkpointed(version, "t0")


def test_sentinel_failover(sentinel: tuple[str, Fleet, int]) -> None:
    url, fleet, master = sentinel
    with Scheduler(url, "test", retry_s=30) as sched:
        sched.create(CONFIG)
        play(sched, 3)
        held = sched.reserve("w1", 3, 2).reservations
        assert fleet.client(master).wait(1, 5000) == 1
        fleet.kill(master)
        started = time.monotonic()
        for claim in held:
            assert sched.complete(claim, trajectory(claim.v_traj)).status == "occupied"
        assert time.monotonic() - started > 0.4  # it was the failover that was waited for
        play(sched, 3)
        assert sched.verify() == []
        assert sched.audit().problems == []
        assert sched.status().version == 6


async def test_sentinel_failover_of_the_async_client(sentinel: tuple[str, Fleet, int]) -> None:
    url, fleet, master = sentinel
    async with AsyncScheduler(url, "test", retry_s=30) as sched:
        await sched.create(CONFIG)
        held = (await sched.reserve("w1", 0, 3)).reservations
        assert fleet.client(master).wait(1, 5000) == 1
        fleet.kill(master)
        done = await sched.complete_many([(claim, trajectory()) for claim in held])
        assert len(done) == 3
        assert await sched.verify() == []


def test_cluster_failover(cluster: tuple[str, Fleet]) -> None:
    url, fleet = cluster
    with Scheduler(url, "test", retry_s=30) as sched:
        sched.create(CONFIG)
        play(sched, 3)
        held = sched.reserve("w1", 3, 2).reservations
        with direct(sched) as client:
            owner = client.get_node_from_key(keys_of(sched.run)["state"])
        assert fleet.client(owner.port).wait(1, 5000) == 1
        fleet.kill(owner.port)
        for claim in held:
            assert sched.complete(claim, trajectory(claim.v_traj)).status == "occupied"
        play(sched, 3)
        assert sched.wait(0, 1) > 0
        assert sched.verify() == []
        assert sched.audit().problems == []
        assert sched.status().version == 6


async def test_cluster_failover_of_the_async_client(cluster: tuple[str, Fleet]) -> None:
    url, fleet = cluster
    async with AsyncScheduler(url, "test", retry_s=30) as sched:
        await sched.create(CONFIG)
        held = (await sched.reserve("w1", 0, 3)).reservations
        with direct(sched) as client:
            owner = client.get_node_from_key(keys_of(sched.run)["state"])
        assert fleet.client(owner.port).wait(1, 5000) == 1
        fleet.kill(owner.port)
        done = await sched.complete_many([(claim, trajectory()) for claim in held])
        assert len(done) == 3
        assert await sched.verify() == []


def test_checks_of_a_deployment(sentinel: tuple[str, Fleet, int]) -> None:
    url, _, _ = sentinel
    wait_for_server(url, 5)
    assert any("appendfsync" in warning for warning in check_server(url))
    assert (server_rss(url) or 0) > 0


def test_checks_of_a_cluster(cluster: tuple[str, Fleet]) -> None:
    url, fleet = cluster
    wait_for_server(url, 5)
    assert any("appendfsync" in warning for warning in check_server(url))
    fleet.end()
    with pytest.raises(ServerUnavailable):
        wait_for_server(url, 0.5)
    with Scheduler(url, "test", retry_s=0.5) as sched, pytest.raises(ServerUnavailable):
        sched.status()
