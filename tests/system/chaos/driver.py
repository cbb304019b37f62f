"""Chaos: many light workers, a trainer with real checkpoints and a real server, while every kind of process
is killed, frozen and stopped at random. At the end every issued prompt must be accounted for exactly once.

    python -m tests.system.chaos.driver --seed 7 --minutes 10
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import msgspec
import redis

from roq import RunConfig, Scheduler, UnknownWorker
from roq.protocol.keys import keys_of
from roq.run.embedded_server import EmbeddedServer
from tests.system.chaos.worker import LEASE_S

__all__ = ["Outcome", "chaos"]

WORKERS = 6
RUN = "chaos"
CONFIG = RunConfig(
    eta=2,
    batch_size=16,
    group_size=2,
    lease_s=LEASE_S,
    max_attempts=4,
    post_process="chaos:judge",
    event_log=50_000_000,
)


class Outcome(msgspec.Struct):
    """What happened, and what was wrong with it."""

    seconds: float = 0.0
    faults: dict[str, int] = {}
    steps: int = 0
    trajectories: int = 0
    fates: dict[str, int] = {}
    staleness: dict[int, int] = {}
    expired: int = 0
    reissued: int = 0
    detection_s: list[float] = []
    reissue_s: list[float] = []
    problems: list[str] = []

    @property
    def kills(self) -> int:
        """Processes that got SIGKILL."""
        return sum(count for fault, count in self.faults.items() if fault.startswith("kill"))


class _Cast:
    """The processes."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder = folder
        self.dice = dice
        self.server = EmbeddedServer(folder)
        self.server.start()
        self.workers: list[subprocess.Popen[str]] = []
        self.frozen: dict[subprocess.Popen[str], float] = {}
        self.killed: dict[str, float] = {}  # worker's name -> when
        self.names: dict[int, Path] = {}
        self.trainer: subprocess.Popen[str] | None = None
        self.server_back: float | None = None
        self.started = 0
        self.problems: list[str] = []

    def spawn(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        self.started += 1
        log = self.folder / f"{module}-{self.started:04d}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tests.system.chaos.{module}", self.server.url, RUN, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.names[process.pid] = log
        return process

    def name_of(self, process: subprocess.Popen[str]) -> str:
        return self.names[process.pid].read_text().partition("\n")[0]

    def keep_up(self) -> None:
        """Replace what died, wake what was frozen, bring the server back."""
        now = time.monotonic()
        if self.server_back is not None and now >= self.server_back:
            self.server.start()
            self.server_back = None
        for process, until in list(self.frozen.items()):
            if now >= until:
                process.send_signal(signal.SIGCONT)
                del self.frozen[process]
        for process in [*self.workers, *([self.trainer] if self.trainer else [])]:
            code = process.poll()
            if code not in (None, *_FINE):
                log = self.names[process.pid]
                self.problems.append(f"{log.name} exited with {code}: {log.read_text()[-2000:]}")
        self.workers = [process for process in self.workers if process.poll() is None]
        while len(self.workers) < WORKERS:
            self.workers.append(self.spawn("worker", str(self.dice.randrange(1 << 30))))
        if self.trainer is None or self.trainer.poll() is not None:
            self.trainer = self.spawn("trainer", str(self.folder))

    def worker(self) -> subprocess.Popen[str]:
        return self.dice.choice(self.workers)

    # -- faults -------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        process = self.worker()
        self.killed[self.name_of(process)] = time.time()
        process.kill()
        self.frozen.pop(process, None)

    def freeze_worker(self) -> None:
        process = self.worker()
        process.send_signal(signal.SIGSTOP)
        self.frozen[process] = time.monotonic() + LEASE_S * self.dice.uniform(1.5, 3)

    def stop_worker(self) -> None:
        process = self.worker()
        if process not in self.frozen:
            process.terminate()

    def drain_worker(self) -> None:
        process = self.worker()
        if process not in self.frozen and (name := self.name_of(process)):
            with suppress(UnknownWorker), Scheduler(self.server.url, RUN, retry_s=120) as sched:
                sched.drain(name)

    def revive_the_dead(self) -> None:
        with Scheduler(self.server.url, RUN, retry_s=120) as sched:
            for letter in sched.dead():
                sched.revive(letter.ordinal)

    def kill_trainer(self) -> None:
        if self.trainer:
            self.trainer.kill()
            self.frozen.pop(self.trainer, None)

    def replace_frozen_trainer(self) -> None:
        """The trainer freezes; another is started beside it, and then it wakes."""
        if self.trainer and self.trainer not in self.frozen:
            old = self.trainer
            old.send_signal(signal.SIGSTOP)
            self.trainer = self.spawn("trainer", str(self.folder))
            time.sleep(1.5)
            old.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 30
            while old.poll() is None:  # fenced, so it ends by itself
                self.keep_up()
                if time.monotonic() > deadline:
                    self.problems.append(f"a superseded trainer goes on: {self.names[old.pid].read_text()}")
                    old.kill()
                    break
                time.sleep(0.05)

    def kill_server(self) -> None:
        self.server.kill()
        self.server_back = time.monotonic() + 0.2

    def restart_server(self) -> None:
        self.server.stop()
        self.server_back = time.monotonic()

    def take_server_away(self) -> None:
        """For longer than a blocking read and a lease."""
        self.server.kill()
        self.server_back = time.monotonic() + self.dice.uniform(3, 6)

    def end(self) -> None:
        for process in list(self.frozen):
            process.send_signal(signal.SIGCONT)
        for process in [*self.workers, *([self.trainer] if self.trainer else [])]:
            process.terminate()
        for process in [*self.workers, *([self.trainer] if self.trainer else [])]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                self.problems.append(f"a process does not end after SIGTERM: {self._where(process)}")
                process.kill()
                process.wait()
            if process.returncode not in _FINE:
                self.problems.append(f"a process ended with {process.returncode} after SIGTERM")

    def _where(self, process: subprocess.Popen[str]) -> str:
        """Its log, with where it hangs if it is a worker."""
        if process in self.workers:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                process.send_signal(number)
                time.sleep(1)
        return self.names[process.pid].read_text()[-6000:]


_FINE = (0, -signal.SIGKILL, -signal.SIGTERM)  # SIGTERM before the process could set its handler

_FAULTS = {  # how often, relative to each other
    "kill_worker": 60,
    "freeze_worker": 12,
    "stop_worker": 12,
    "drain_worker": 6,
    "revive_the_dead": 4,
    "kill_trainer": 10,
    "replace_frozen_trainer": 2,
    "kill_server": 5,
    "restart_server": 2,
    "take_server_away": 1,
}


def chaos(
    folder: Path, seed: int, seconds: float, gap_s: float = 1.6, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Run chaos for so long in ``folder``, then let everything come to rest and look at the books."""
    dice = random.Random(seed)
    cast = _Cast(folder, dice)
    faults: Counter[str] = Counter()
    started = time.monotonic()
    try:
        with Scheduler(cast.server.url, RUN, retry_s=120) as sched:
            sched.create(CONFIG, weights="base")
            next_fault = started + 2
            next_word = started + 10
            while time.monotonic() - started < seconds:
                cast.keep_up()
                if cast.problems:
                    break
                now = time.monotonic()
                if now >= next_fault and cast.server_back is None:
                    fault = dice.choices(list(_FAULTS), list(_FAULTS.values()))[0]
                    getattr(cast, fault)()
                    faults[fault] += 1
                    next_fault = now + dice.expovariate(1 / gap_s)
                if now >= next_word and cast.server_back is None:
                    status = sched.status()
                    say(f"{now - started:5.0f} s  step {status.version}  {dict(faults)}")
                    if problems := sched.verify():
                        cast.problems += problems
                    next_word = now + 10
                time.sleep(0.05)
            _rest(cast, sched)
            cast.end()
            return _books(cast, sched, faults, time.monotonic() - started)
    finally:
        for process in [*cast.workers, *([cast.trainer] if cast.trainer else [])]:
            if process.poll() is None:
                process.kill()
                process.wait()
        cast.server.stop()


def _rest(cast: _Cast, sched: Scheduler) -> None:
    """No more faults: admission stops, what runs finishes, READY batches are trained."""
    deadline = time.monotonic() + 60
    cast.keep_up()
    if cast.server_back is not None:
        time.sleep(max(0.0, cast.server_back - time.monotonic()))
        cast.keep_up()
    sched.pause()
    while time.monotonic() < deadline:
        cast.keep_up()
        status = sched.status()
        ready = any(buffer.state in ("READY", "TRAINING") for buffer in status.buffers)
        if not ready and status.inflight == 0 and status.pending == 0:
            return
        time.sleep(0.2)
    cast.problems.append(f"it did not come to rest within 60 s: {sched.status()}")


def _books(cast: _Cast, sched: Scheduler, faults: Counter[str], seconds: float) -> Outcome:
    status = sched.status()
    audit = sched.audit()
    problems = [*cast.problems, *sched.verify(), *audit.problems]
    if not status.ledger.balanced or sum(audit.fates.values()) != audit.issued:
        problems.append(f"the ledger does not balance: {status.ledger}, {audit.fates}")
    client = redis.Redis.from_url(cast.server.url)
    expected = set(keys_of(RUN).values())
    leftover = {key.decode() for key in client.keys("*")} - expected
    if leftover:
        problems.append(f"keys are left over: {sorted(leftover)}")
    events = _events(client)
    detection, reissue = _delays(events, cast.killed)
    batches = list(cast.folder.glob("batch-*.txt"))
    if len(batches) < status.version:
        problems.append(f"{len(batches)} batches were logged for {status.version} steps")
    return Outcome(
        seconds=seconds,
        faults=dict(faults),
        steps=status.version,
        trajectories=sum(event["event"] == "complete" for _, event in events),
        fates=audit.fates,
        staleness=audit.staleness,
        expired=audit.expired,
        reissued=audit.reissued,
        detection_s=detection,
        reissue_s=reissue,
        problems=problems,
    )


def _events(client: redis.Redis) -> list[tuple[float, dict[str, str]]]:
    out: list[tuple[float, dict[str, str]]] = []
    start = "-"
    while page := client.xrange(keys_of(RUN)["events"], start, "+", count=2000):
        for stamp, fields in page:
            at = int(stamp.split(b"-")[0]) / 1000
            out.append((at, {name.decode(): value.decode() for name, value in fields.items()}))
        start = f"({page[-1][0].decode()}"
    return out


def _delays(
    events: list[tuple[float, dict[str, str]]], killed: dict[str, float]
) -> tuple[list[float], list[float]]:
    """Seconds from a worker's SIGKILL to the expiry of its claims, and to their next issue."""
    detection: list[float] = []
    reissue: list[float] = []
    waiting: dict[tuple[str, str], float] = {}
    for at, event in events:
        if event["event"] == "expired" and event["worker"] in killed:
            detection.append(at - killed[event["worker"]])
            waiting[event["group"], event["member"]] = killed[event["worker"]]
        elif event["event"] == "reissue":
            keys = [(event["group"], member) for member in event["members"].split(",")]
            reissue += [at - waiting.pop(key) for key in keys if key in waiting]
    return sorted(detection), sorted(reissue)


def _share(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


@click.command()
@click.option("--seed", default=7, show_default=True)
@click.option("--minutes", default=10.0, show_default=True)
def main(seed: int, minutes: float) -> None:
    """Run chaos and print what it did; exits 1 when anything was lost or doubled."""
    with tempfile.TemporaryDirectory(prefix="roq-chaos-") as folder:
        outcome = chaos(Path(folder), seed, minutes * 60, say=click.echo)
    click.echo(
        f"seed {seed}, {outcome.seconds:.0f} s, {outcome.steps} steps, {outcome.trajectories} trajectories"
    )
    click.echo(f"faults: {outcome.faults}; {outcome.kills} kills")
    click.echo(f"prompts: {outcome.fates}; staleness of trained groups: {outcome.staleness}")
    click.echo(f"leases: {outcome.expired} expired, {outcome.reissued} issued again")
    for what, values in (("detection", outcome.detection_s), ("re-issue", outcome.reissue_s)):
        click.echo(
            f"from kill to {what}: median {_share(values, 0.5):.2f} s, 99% {_share(values, 0.99):.2f} s, "
            f"longest {_share(values, 1):.2f} s (lease {LEASE_S} s)"
        )
    for problem in outcome.problems:
        click.echo(f"PROBLEM: {problem}")
    raise SystemExit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
