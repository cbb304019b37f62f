"""Hosts of their own: network namespaces with an address each, joined by a bridge, and Redis in one of them.

Redis speaks TLS only, and every process logs in under its role.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from roq import Scheduler
from roq.admin.acl import acl_file
from roq.protocol.functions import ROLES
from tests.conftest import environment, server_binary
from tests.waiting import eventually

ADDRESS = {
    name: f"10.213.77.{last}" for last, name in enumerate(("redis", "one", "two", "train", "train2"), 1)
}


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
    """Redis with TLS and a user for each role; the logs of all that is started are files in the folder."""

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

    def stop(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        for name in names:
            assert self.processes[name].wait(20) == 0, (self.folder / f"{name}.log").read_text()[-2000:]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)
