"""Two workers, a trainer and Redis, each in a network namespace with its own address, joined by a bridge.

Redis speaks TLS only, and every process logs in under its role. One worker's link goes down for longer than
its lease and comes back. The workers and the trainer are those of the chaos driver: the real protocol,
without engines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from roq import RunConfig, Scheduler
from roq.acl import ROLES, acl_file
from tests.chaos.worker import LEASE_S
from tests.cli.conftest import environment
from tests.conftest import server_binary

ADDRESS = {"redis": "10.213.77.1", "one": "10.213.77.2", "two": "10.213.77.3", "train": "10.213.77.4"}
CONFIG = RunConfig(eta=2, batch_size=8, group_size=2, lease_s=LEASE_S, max_attempts=50, event_log=1_000_000)
CHAOS = Path(__file__).parents[1] / "chaos"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


class Network:
    """A switch and a host for each address, in namespaces that no other process sees."""

    def __init__(self) -> None:
        self.mark = f"rq{os.getpid() % 100_000}"
        self.made: list[str] = []
        switch = self.space("switch")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for name, address in ADDRESS.items():
            host = self.space(name)
            ip("-n", host, "link", "add", "eth", "type", "veth", "peer", "name", name, "netns", switch)
            ip("-n", switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{address}/24", "dev", "eth")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "eth", "up")

    def space(self, name: str) -> str:
        space = f"{self.mark}-{name}"
        if space not in self.made:
            ip("netns", "add", space)
            self.made.append(space)
        return space

    def link(self, name: str, state: str) -> None:
        """Plug a host's cable in or out, at the switch: the host keeps its address and its sockets."""
        ip("-n", self.space("switch"), "link", "set", name, state)

    def start(self, name: str, *command: object, **options: Any) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", self.space(name), *map(str, command)]
        return subprocess.Popen(words, text=True, **options)

    def remove(self) -> None:
        for space in self.made:
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=10)


@pytest.fixture
def network() -> Iterator[Network]:
    why = None
    if os.geteuid() != 0 or shutil.which("ip") is None:
        why = "network namespaces need root and iproute2"
    elif server_binary("redis") is None:
        why = "no redis-server on this machine; Debian's speaks TLS"
    elif subprocess.run(["ip", "netns", "add", "rq-probe"], capture_output=True).returncode != 0:
        why = "this machine does not let root make network namespaces"
    else:
        ip("netns", "del", "rq-probe")
    if why is not None:
        if os.environ.get("ROQ_CI"):
            pytest.fail(why)
        pytest.skip(why)
    made = Network()
    yield made
    made.remove()


class Deployment:
    """Redis with TLS and users, two workers, a trainer; their logs are files in the folder."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        ca = trustme.CA()
        cert = ca.issue_cert(ADDRESS["redis"])
        ca.cert_pem.write_to_path(folder / "ca.pem")
        cert.private_key_pem.write_to_path(folder / "server.key")
        cert.cert_chain_pems[0].write_to_path(folder / "server.pem")
        users = acl_file(ROLES, ["net"], "roq-", folder / "secrets", close_default=True)
        (folder / "users.acl").write_text("\n".join(users) + "\n")
        options = {
            "bind": ADDRESS["redis"],
            "port": 0,
            "tls-port": 6379,
            "tls-cert-file": folder / "server.pem",
            "tls-key-file": folder / "server.key",
            "tls-ca-cert-file": folder / "ca.pem",
            "tls-auth-clients": "no",
            "aclfile": folder / "users.acl",
            "unixsocket": folder / "s.sock",  # for this test, which is in no namespace of the four
            "appendonly": "yes",
            "appendfsync": "always",
            "dir": folder,
            "save": "",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.start("redis", "redis", server_binary("redis"), *words)
        eventually((folder / "s.sock").exists, 10)
        (folder / "checkpoints").mkdir()

    def start(self, name: str, host: str, *command: object) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = self.network.start(
                host,
                *command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | {"PYTHONWARNINGS": "ignore"},
            )

    def url(self, role: str) -> str:
        login = f"username=roq-{role}&password_file={self.folder}/secrets/{role}"
        return f"rediss://{ADDRESS['redis']}:6379?{login}&ssl_ca_certs={self.folder}/ca.pem"

    def local(self, role: str) -> Scheduler:
        """A client from outside the namespaces, over the unix socket, under the same rules."""
        login = f"username=roq-{role}&password_file={self.folder}/secrets/{role}"
        return Scheduler(f"unix://{self.folder}/s.sock?{login}", "net", retry_s=10)

    def worker(self, host: str, seed: int) -> None:
        self.start(host, host, sys.executable, CHAOS / "worker.py", self.url("worker"), "net", seed)

    def trainer(self) -> None:
        program = CHAOS / "trainer.py"
        folder = self.folder / "checkpoints"
        self.start("train", "train", sys.executable, program, self.url("trainer"), "net", folder)

    def stop(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        for name in names:
            assert self.processes[name].wait(20) == 0, (self.folder / f"{name}.log").read_text()[-2000:]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def deployment(network: Network, tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(network, tmp_path)
    yield made
    made.kill()


def eventually(what: Callable[[], Any], within: float) -> Any:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {within} s")


@pytest.mark.slow
def test_hosts_of_their_own(deployment: Deployment, network: Network) -> None:
    with deployment.local("admin") as admin:
        admin.create(CONFIG, weights="w0")
    with deployment.local("board") as board:
        deployment.worker("one", 1)
        deployment.worker("two", 2)
        deployment.trainer()
        eventually(lambda: board.status().version >= 5, 60)
        peers = {
            name: network.start(name, "ip", "-j", "address", "show", "eth", stdout=subprocess.PIPE)
            for name in ("one", "two", "train")
        }
        for name, process in peers.items():
            shown = json.loads(process.communicate(timeout=10)[0])
            assert ADDRESS[name] in str(shown)
        assert len(board.status().workers) == 2

        # one worker's cable is out for longer than its lease: the other takes its work over
        lost = (deployment.folder / "two.log").read_text().split()[0]
        network.link("two", "down")
        eventually(lambda: lost not in {worker.worker for worker in board.status().workers}, 20)
        at = board.status().version
        eventually(lambda: board.status().version >= at + 3, 60)
        # and back: it drops what it lost, and goes on under its old name
        network.link("two", "up")
        eventually(lambda: lost in {worker.worker for worker in board.status().workers}, 60)
        at = board.status().version
        eventually(lambda: board.status().version >= at + 3, 60)

        # the trainer's and the server's cables too
        for name in ("train", "redis"):
            network.link(name, "down")
            time.sleep(2 * LEASE_S)
            network.link(name, "up")
            at = board.status().version
            eventually(lambda at=at: board.status().version >= at + 2, 60)

        deployment.stop("one", "two", "train")
        assert board.status().workers == []
        assert board.verify() == []
        audit = board.audit()
    assert audit.problems == []
    assert audit.expired > 0
    assert max(audit.staleness) <= CONFIG.eta
    for name in ("one", "two", "train"):
        log = (deployment.folder / f"{name}.log").read_text()
        assert "Traceback" not in log
        assert not any((deployment.folder / "secrets" / role).read_text().strip() in log for role in ROLES)
