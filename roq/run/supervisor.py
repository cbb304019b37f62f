"""Keep a run's worker and trainer processes running. No process depends on the supervisor.

Each process is detached, in its own session, and recorded in ``RUN/pids.json``. If the supervisor is killed,
the processes continue; the next supervisor attaches to live ones and starts the others. A process that ends
is restarted after a growing pause, up to a maximum of consecutive failures.
"""

from __future__ import annotations

import fcntl
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from roq.errors import ConfigError, ProcessFailed
from roq.processes import (
    ProcessRecord,
    exit_code,
    make_run_folder,
    read_records,
    spawn,
    start_mark,
    stop,
    tail,
    write_records,
)

__all__ = ["Restarts", "Supervisor", "running_supervisor", "sole_supervisor"]

LOCK = "up.lock"  # in the run's folder; the first file that a supervisor creates


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """The restart policy for ended processes.

    Attributes:
        first_s, longest_s: the pause after the first failure, doubled with each further one; its maximum.
        most: consecutive failures after which a process is not restarted.
        healthy_s: a process that ran this long, while the run made progress, has its failures reset.
    """

    first_s: float = 1.0
    longest_s: float = 30.0
    most: int = 5
    healthy_s: float = 60.0


class _Child:
    """A process that should run, across its restarts."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.record: ProcessRecord | None = None
        self.popen: subprocess.Popen[bytes] | None = None  # None for one that another supervisor started
        self.begun = 0.0  # monotonic
        self.begun_version = 0
        self.failures = 0
        self.again_at = 0.0  # monotonic; when to start it next, while record is None
        self.code: int | None = None  # its last exit code; None if unknown
        self.done = False
        self.fatal = ""

    def poll(self) -> bool:
        """True while it runs; afterwards ``code`` is its exit code."""
        if self.record is None:
            return False
        if self.popen is not None:
            self.code = exit_code(self.popen)
            return self.code is None
        self.code = None
        return self.record.alive


class Supervisor:
    """The processes of one run folder.

    Args:
        run_dir: the run's folder.
        commands: the commands to run, by name; ``trainer`` is the trainer, all others are workers.
        env: the environment of the processes.
        log: called with a line for every start, end and restart.
        restarts: the restart policy.
    """

    def __init__(
        self,
        run_dir: Path,
        commands: Mapping[str, Sequence[str]],
        env: Mapping[str, str],
        log: Callable[[str], None],
        restarts: Restarts | None = None,
    ) -> None:
        self._folder = run_dir
        self._env = env
        self._log = log
        self._restarts = restarts or Restarts()
        self._children = [
            _Child(name, command, run_dir / "logs" / f"{name}.log") for name, command in commands.items()
        ]

    @property
    def pids_file(self) -> Path:
        """The file that records the processes."""
        return self._folder / "pids.json"

    def start(self, version: int = 0, *, ended: bool = False) -> None:
        """Attach to recorded processes that are alive, start the others, and stop surplus ones.

        Nothing is started for a run that has ended.
        """
        recorded = read_records(self.pids_file)
        for child in self._children:
            record = recorded.pop(child.name, None)
            if record is not None and record.alive:
                child.record, child.popen, child.begun = record, None, time.monotonic()
                child.begun_version = version
                self._log(f"{child.name} is running (pid {record.pid}): attached")
            elif ended:
                child.done = True
            else:
                self._start(child, version)
        surplus = [record for record in recorded.values() if record.alive]
        for record in surplus:
            self._log(f"{record.name} (pid {record.pid}) is no longer configured; stopping it")
        stop(surplus, 20.0)
        self._write()

    def poll(self, version: int, ended: Callable[[], bool]) -> None:
        """Detect ended processes, and restart those whose pause is over.

        Args:
            version: the run's weights version, to detect progress.
            ended: called when a process has ended; returns True if the run is over.

        Raises:
            ProcessFailed, ConfigError: the trainer, or the last of the workers, failed for good.
        """
        for child in self._children:
            if child.done or child.fatal or child.poll():
                continue
            if child.record is not None:
                self._ended(child, version, ended())
            elif time.monotonic() >= child.again_at:
                self._start(child, version)
        workers = [child for child in self._children if child.name != "trainer"]
        lost = next((child for child in self._children if child.fatal and child.name == "trainer"), None)
        if lost is None and workers and all(child.fatal for child in workers):
            lost = workers[-1]
        if lost is not None:
            raise (ConfigError if lost.code == ConfigError.exit_code else ProcessFailed)(lost.fatal)

    @property
    def finished(self) -> bool:
        """True if no process is running or will be restarted."""
        return all(child.done or child.fatal for child in self._children)

    @property
    def trainer_finished(self) -> bool:
        """True if the trainer is not running and will not be restarted."""
        return all(child.done or bool(child.fatal) for child in self._children if child.name == "trainer")

    def stop(self, grace_s: float, *, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Send SIGTERM, wait ``grace_s`` or until ``hurry()``, then SIGKILL the rest; returns their names."""
        running = [child for child in self._children if child.record is not None and child.poll()]
        records = [child.record for child in running if child.record is not None]

        def poll() -> None:
            for child in running:
                child.poll()

        killed = stop(records, grace_s, poll=poll, hurry=hurry)
        for child in running:
            if child.popen is not None:
                child.popen.wait(timeout=10)
            child.record, child.popen, child.done = None, None, True
        self._write()
        return [record.name for record in killed]

    def _start(self, child: _Child, version: int) -> None:
        child.record, child.popen = spawn(child.name, child.command, child.log, self._env)
        child.begun, child.begun_version = time.monotonic(), version
        self._write()  # at once: an unrecorded process would be started twice
        self._log(f"{child.name} started (pid {child.record.pid}), log {child.log}")

    def _ended(self, child: _Child, version: int, ended: bool) -> None:
        assert child.record is not None
        lived = time.monotonic() - child.begun
        child.record, child.popen = None, None
        self._write()
        # The exit code of an attached process is unknown: at the end of the run it counts as 0.
        if ended and (child.name != "trainer" or child.code in (0, None)):
            child.done = True
            return
        if child.name != "trainer" and child.code == 0:
            child.done = True
            self._log(f"{child.name} was drained and has left; the run continues without it")
            return
        if lived >= self._restarts.healthy_s and version > child.begun_version:
            child.failures = 0
        child.failures += 1
        how = _how(child.code)
        last = tail(child.log, 5)
        if child.code == ConfigError.exit_code or child.failures >= self._restarts.most:
            times = f"{child.failures} times in a row" if child.failures > 1 else "and cannot continue"
            child.fatal = f"{child.name} {how} {times}; {child.log} ends: {_last_error(child.log)}"
            self._log(child.fatal)
            return
        pause = min(self._restarts.longest_s, self._restarts.first_s * 2 ** (child.failures - 1))
        child.again_at = time.monotonic() + pause
        self._log(
            f"{child.name} {how} after {lived:.0f} s; restarting it in {pause:g} s "
            f"(failure {child.failures} of at most {self._restarts.most}); its log ends:"
        )
        for line in last or ["(empty)"]:
            self._log(f"    {line}")

    @property
    def folder_is_gone(self) -> bool:
        """True if the run's folder was deleted since the start, even if it exists again."""
        return not (self._folder / LOCK).exists()

    def _write(self) -> None:
        if not self._folder.is_dir():  # deleted: up() reports it
            return
        running = {child.name: child.record for child in self._children if child.record is not None}
        write_records(self.pids_file, running)


def _last_error(log: Path) -> str:
    """The error line of the process itself (torchrun prints many others), or the last line."""
    lines = tail(log, 200, limit=65536)
    own = [line for line in lines if line.startswith(("roq-trainer:", "roq-worker:"))]
    return (own or lines or ["(empty)"])[-1]


def _how(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# ---- one supervisor at a time --------------------------------------------------------------------


def running_supervisor(run_dir: Path) -> ProcessRecord | None:
    """The live ``roq up`` of a run folder, if there is one."""
    try:
        record = msgspec.json.decode((run_dir / "up.json").read_bytes(), type=ProcessRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return record if record.alive else None


@contextmanager
def sole_supervisor(run_dir: Path, pid: int) -> Generator[None]:
    """Hold the run folder's lock: a second supervisor would start everything twice.

    Raises:
        ProcessFailed: another supervisor holds it.
    """
    make_run_folder(run_dir)
    with (run_dir / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = running_supervisor(run_dir)
            who = f" (pid {other.pid})" if other else ""
            busy = f"another roq up{who} is already running in {run_dir}"
            raise ProcessFailed(f"{busy}; see roq status, or stop it with roq down") from None
        record = ProcessRecord(name="up", pid=pid, mark=start_mark(pid) or "gone")
        (run_dir / "up.json").write_bytes(msgspec.json.encode(record))
        try:
            yield
        finally:
            (run_dir / "up.json").unlink(missing_ok=True)
