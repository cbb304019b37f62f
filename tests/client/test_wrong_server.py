"""Connections that lead to a demoted master: dropped, so that the address is asked again."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from roq import AsyncScheduler, NotAllowed, RunConfig, Scheduler
from tests.conftest import KINDS, Server
from tests.ports import free_ports
from tests.protocol.play import trajectory
from tests.users import make_users, url_of
from tests.waiting import eventually

CONFIG = RunConfig(eta=1, batch_size=16)
LATE = 10**6  # a signal that no run reaches


class Relay(socketserver.BaseRequestHandler):
    """Carries the bytes of one connection, which stays with the server it was opened to."""

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(self.server.target.socket))  # type: ignore[attr-defined]
            back = threading.Thread(target=self.pump, args=(other, self.request))
            back.start()
            self.pump(self.request, other)
            back.join()

    @staticmethod
    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Address(socketserver.ThreadingTCPServer):
    """One address in front of two servers, as a DNS name, a virtual IP or a Kubernetes Service is."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, first: Server, second: Server, ports: tuple[int, int]) -> None:
        super().__init__(("127.0.0.1", 0), Relay)
        self.target = first
        self.servers = (first, second)
        self.ports = ports
        self.url = f"redis://127.0.0.1:{self.server_address[1]}"

    def move(self) -> None:
        """A planned failover: all writes are on the replica, then it becomes the master."""
        old, new = self.servers
        assert old.redis.execute_command("WAIT", 1, 5000) == 1
        new.redis.execute_command("REPLICAOF", "NO", "ONE")
        self.target = new
        old.redis.execute_command("REPLICAOF", "127.0.0.1", self.ports[1])


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Address]:
    ports = free_ports(2)
    quick = ("--repl-diskless-sync-delay", "0")
    servers: list[Server] = []
    try:
        for number, port in enumerate(ports):
            folder = tmp_path / str(number)
            folder.mkdir()
            servers.append(Server(request.param, folder, "--port", str(port), "--bind", "127.0.0.1", *quick))
        servers[1].redis.execute_command("REPLICAOF", "127.0.0.1", ports[0])
        eventually(lambda: servers[1].redis.info("replication")["master_link_status"] == "up")
        with Address(servers[0], servers[1], (ports[0], ports[1])) as found:
            thread = threading.Thread(target=found.serve_forever, args=(0.01,))
            thread.start()
            yield found
            found.shutdown()
            thread.join(10)
    finally:
        for server in servers:
            server.kill()


def blocked(server: Server) -> int:
    return int(server.redis.info("clients")["blocked_clients"])


def test_an_address_that_moves(address: Address) -> None:
    with Scheduler(address.url, "test", retry_s=10) as sched:
        sched.create(CONFIG)
        claims = sched.reserve("w0", 0, 16).reservations
        results: dict[str, object] = {}

        def wait(name: str) -> None:
            waiter = sched if name == "shared" else others[name]
            results[name] = waiter.wait(LATE, 3) if name != "events" else waiter.events(last, wait_s=3)

        newest = sched.newest_event(None)
        assert newest is not None
        last = newest.id
        others = {name: Scheduler(address.url, "test", retry_s=10) for name in ("own", "events")}
        threads = [threading.Thread(target=wait, args=(name,)) for name in ("shared", "own", "events")]
        for thread in threads:
            thread.start()
        eventually(lambda: blocked(address.servers[0]) == 3)
        address.move()  # unblocks all three with an error
        assert sched.complete(claims[0], trajectory()).status == "occupied"
        done = sched.complete_many([(claim, trajectory()) for claim in claims[1:]])
        assert [answer.status for answer in done] == ["occupied"] * 15  # type: ignore[union-attr]
        for thread in threads:
            thread.join(20)
        assert results["shared"] == results["own"] == LATE
        assert results["events"] != []  # those of the new master
        for other in others.values():
            other.close()
        assert sched.verify() == []
        assert sched.audit().problems == []


async def test_an_address_that_moves_under_many_tasks(address: Address) -> None:
    async with AsyncScheduler(address.url, "test", retry_s=10) as sched:
        await sched.create(CONFIG)
        claims = (await sched.reserve("w0", 0, 16)).reservations
        waits = [asyncio.create_task(sched.wait(LATE, 3)) for _ in range(4)]
        await asyncio.to_thread(eventually, lambda: blocked(address.servers[0]) == len(waits))
        address.move()
        many = asyncio.create_task(sched.complete_many([(claim, trajectory()) for claim in claims[8:]]))
        done = await asyncio.gather(*(sched.complete(claim, trajectory()) for claim in claims[:8]))
        assert [answer.status for answer in [*done, *await many]] == ["occupied"] * 16  # type: ignore[union-attr]
        assert await asyncio.gather(*waits) == [LATE] * 4
        assert await sched.verify() == []
        assert (await sched.audit()).problems == []


def test_threads_whose_connections_lead_astray(address: Address) -> None:
    """Each thread drops the connections it was misled by, and none that another thread works with."""
    with Scheduler(address.url, "test", retry_s=10) as sched:
        sched.create(CONFIG)
        moved = threading.Event()
        over: list[int] = []

        def renew(name: str) -> None:
            calls = 0
            while not moved.is_set() or calls < 20:
                sched.renew(name, 0)
                calls += 1
            over.append(calls)

        threads = [threading.Thread(target=renew, args=(f"w{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        address.move()
        moved.set()
        for thread in threads:
            thread.join(20)
        assert len(over) == 8


def test_only_a_refusal_of_the_library_is_refused(server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path)
    with (
        Scheduler(server.url, "test", retry_s=1) as sched,
        Scheduler(url_of(server, tmp_path, "trainer"), "test", retry_s=1) as trainer,
    ):
        sched.create(CONFIG)
        claims = sched.reserve("w0", 0, 2).reservations
        with pytest.raises(NotAllowed):
            trainer.complete_many([(claim, trajectory()) for claim in claims])
        assert sched.status().inflight == 2
