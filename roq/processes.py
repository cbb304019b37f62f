"""Detached processes that can be found again: started in their own session, identified by pid and start time.

The system may have given the pid to another program, so a record also holds the process's start time; a
process is only signalled while both match.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from roq.errors import ConfigError, RoqError
from roq.text import one_line

__all__ = [
    "ProcessRecord",
    "die_with_parent",
    "end_with",
    "exit_code",
    "finish",
    "make_run_folder",
    "read_records",
    "report_error",
    "send",
    "spawn",
    "start_mark",
    "stop",
    "tail",
    "unique_name",
    "watch_parent",
    "write_records",
]

KILL_S = 5.0  # a killed process is gone at once, unless it is in a system call
_PR_SET_PDEATHSIG = 1


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A started process: its name, pid, start mark (:func:`start_mark`), command and log file."""

    name: str
    pid: int
    mark: str
    command: list[str] = []
    log: str = ""

    @property
    def alive(self) -> bool:
        """True if this process, not a later one with its pid, is running."""
        return start_mark(self.pid) == self.mark


def unique_name(prefix: str = "") -> str:
    """A name unique to this start of a process, for use in keys: ``prefix``, host, pid and random digits.

    Raises:
        ConfigError: the prefix contains an illegal character or is too long.
    """
    if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,31})?", prefix):
        raise ConfigError(
            f"prefix {prefix[:80]!r} of a name must be letters, digits, '.', '_' or '-', at most 32"
        )
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname())[:64].strip("-.") or "host"
    return f"{prefix}{host}-{os.getpid()}-{secrets.token_hex(3)}"


def start_mark(pid: int) -> str | None:
    """The start time of process ``pid``, as text to compare; None if it does not exist or is a zombie."""
    if not sys.platform.startswith("linux"):
        found = subprocess.run(
            ["ps", "-o", "state=,lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
        state, _, started = found.stdout.strip().partition(" ")
        return None if not started or state.startswith("Z") else started.strip()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the program's name, before it, may contain anything
    return None if fields[0] in "ZX" else f"{boot[:8]}-{fields[19]}"


def spawn(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
) -> tuple[ProcessRecord, subprocess.Popen[bytes]]:
    """Start ``command`` in a new session and append its output to ``log``.

    It outlives this process and its terminal. Keep the Popen for :func:`exit_code`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=dict(env),
        )
    return ProcessRecord(
        name=name, pid=child.pid, mark=start_mark(child.pid) or "gone", command=list(command), log=str(log)
    ), child


def exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """The child's exit code, None while it runs. The rest of its process group is killed.

    The group is signalled before the child is reaped: until then no other group can have its number.
    """
    if child.returncode is not None:
        return child.returncode
    if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _signal_group(child.pid, signal.SIGKILL)
    return child.wait()


def send(record: ProcessRecord, number: signal.Signals) -> bool:
    """Signal the recorded process; returns False if it no longer runs."""
    if not record.alive:
        return False
    try:
        os.kill(record.pid, number)
    except ProcessLookupError:
        return False
    return True


def finish(record: ProcessRecord) -> None:
    """Kill the recorded process, if it is running, with its whole process group."""
    if not record.alive:
        return
    _signal_group(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while record.alive and time.monotonic() < deadline:
        time.sleep(0.005)


def stop(
    records: Sequence[ProcessRecord],
    wait_s: float,
    *,
    poll: Callable[[], object] = lambda: None,
    hurry: Callable[[], bool] = lambda: False,
) -> list[ProcessRecord]:
    """Send SIGTERM to all, wait at most ``wait_s`` for them to end, kill the rest; returns those killed.

    ``poll`` is called while waiting (to reap children); the wait ends early when ``hurry`` returns True.
    """
    for record in records:
        send(record, signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    left = [record for record in records if record.alive]
    while left and time.monotonic() < deadline and not hurry():
        poll()
        time.sleep(0.05)
        left = [record for record in left if record.alive]
    for record in left:
        finish(record)
    poll()
    return left


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
        os.killpg(pid, number)


def read_records(path: Path) -> dict[str, ProcessRecord]:
    """The records in a pids file by name; empty if there is no file."""
    try:
        return {
            record.name: record for record in msgspec.json.decode(path.read_bytes(), type=list[ProcessRecord])
        }
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def write_records(path: Path, records: Mapping[str, ProcessRecord]) -> None:
    """Replace the pids file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(list(records.values())), indent=1))
    new.replace(path)


def make_run_folder(path: Path) -> None:
    """Create a run's folder, readable by its user only; one that exists keeps its mode.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: {path} cannot be created: {error.strerror}") from None


def tail(path: str | Path, lines: int = 5, limit: int = 16384) -> list[str]:
    """The last non-empty lines of a log, at most ``lines``; empty when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip()[:400] for line in text.splitlines() if line.strip()][-lines:]


# ---------------------------------------------------------------------------------------------
# Processes that end with the one that started them, even if that is killed with SIGKILL


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere :func:`watch_parent`.

    Works even while this process holds the GIL. Use it only for children that the main thread starts.
    """
    parent = os.getppid()
    if not sys.platform.startswith("linux"):
        watch_parent()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def watch_parent(every_s: float = 1.0) -> None:
    """End this process soon after its parent is gone, regardless of the thread that started it."""
    parent = os.getppid()
    _end_unless(lambda: os.getppid() == parent, every_s)


def end_with(pid: int, mark: str, every_s: float = 1.0) -> None:
    """End this process soon after another process, not its parent, is gone.

    Args:
        pid, mark: the other process, and its start mark (:func:`start_mark`).
    """
    _end_unless(lambda: start_mark(pid) == mark, every_s)


def _end_unless(alive: Callable[[], bool], every_s: float) -> None:
    def watch() -> None:
        while alive():
            time.sleep(every_s)
        os._exit(1)

    threading.Thread(target=watch, name="end-with", daemon=True).start()


def report_error(program: str, error: RoqError) -> int:
    """Print the error that ends this process as one line on stderr; returns the exit code."""
    print(f"{program}: {one_line(error)}", file=sys.stderr, flush=True)
    return error.exit_code
