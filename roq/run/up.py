"""``roq up``: a whole run on this machine, from one job file to its summary.

Checks the input, starts a server (unless the job names one), creates the run, starts the workers and
the trainer, and then only restarts processes that die and shows progress. The processes are detached:
they continue if ``roq up`` is killed, and the next one attaches to them. At the end of the run, or on a
signal, it stops the server that it started.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from roq.admin.server import check_server, masked, server_rss, wait_for_server
from roq.client import Scheduler
from roq.config import Job, RunConfig, load_job
from roq.errors import RoqError, ServerUnavailable
from roq.events.follow import read_events
from roq.job.checks import check_engines, check_job, check_supply, process_environment
from roq.job.prompts import load_prompts
from roq.job.stored import create_run
from roq.job.tokens import check_prompts_here
from roq.observe.display import Display, View
from roq.observe.metrics_log import Records
from roq.observe.plots import write_summary_plot
from roq.observe.summary import Summary, summarize, write_summary
from roq.observe.timeline import Timeline, timeline_of, wait_shares
from roq.processes import finish, read_records, send, stop
from roq.run.embedded_server import EmbeddedServer, find_binary
from roq.run.supervisor import Restarts, Supervisor, running_supervisor, sole_supervisor
from roq.types import Status
from roq.weights import weight_store

__all__ = ["down", "trainer_command", "up", "worker_command"]

WAIT_FOR_SERVER_S = 60.0
LOOK_S = 0.5  # between two status updates
TRAINER_GRACE_S = 35.0  # torchrun gives its ranks 30 s


def _server(url: str) -> list[str]:
    """The server's arguments; a URL with a password goes only into the environment, which ``ps`` hides."""
    return ["--redis", url] if masked(url) == url else []


def worker_command(url: str, run: str) -> list[str]:
    """The command that starts a rollout worker."""
    return [sys.executable, "-m", "roq_worker", *_server(url), "--run", run]


def trainer_command(url: str, run: str, ranks: int) -> list[str]:
    """The command that starts the trainer, with torchrun if it has several ranks."""
    target = ["roq_trainer", *_server(url), "--run", run]
    if ranks == 1:
        return [sys.executable, "-m", *target]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # Without "--" torchrun takes --run for an abbreviation of its own --run-path.
    return [sys.executable, *torchrun, "-m", "--", *target]


def up(
    config_file: Path,
    display: Display,
    *,
    worker: Callable[[str, str], Sequence[str]] = worker_command,
    trainer: Callable[[str, str, int], Sequence[str]] = trainer_command,
    restarts: Restarts | None = None,
) -> tuple[Summary | None, int]:
    """Run the job to its end; returns the summary, or None and the number of the signal that stopped it.

    A run that stopped before its goal says so in ``Summary.shortfall``.

    Raises:
        ConfigError, UnsuitableServer, ConfigMismatch: the input is invalid; nothing was changed.
        RoqError: the trainer, all workers or the server failed for good; all were stopped.
    """
    # ---- check everything before changing anything
    display.say(f"checking {config_file}")
    job = load_job(config_file)
    if worker is worker_command:
        check_engines()
    check_job(job, config_file, engines_here=True)
    weight_store(job.run)  # checks that its driver is installed
    prompts = load_prompts(job.data)
    check_prompts_here(job, prompts, display.say)
    if (warning := check_supply(job.protocol, len(prompts))) is not None:
        display.say(f"warning: {warning}")
    folder = Path(job.run.dir)
    server = EmbeddedServer(folder) if job.redis.url is None else None
    if job.redis.url is not None:
        wait_for_server(job.redis.url, WAIT_FOR_SERVER_S, display.say)
        for warning in check_server(job.redis.url):
            display.say(f"warning: {warning}")
    else:
        find_binary()

    fresh = not folder.exists()
    with sole_supervisor(folder, os.getpid()), _signals() as signals:
        # ---- server and run
        url, started = job.redis.url or "", False
        if server is not None:
            display.say("starting the server")
            started = server.start(display.say)
            url = server.url
        try:
            display.say("creating the run")
            with Scheduler(url, job.run.name, retry_s=10.0) as scheduler:
                create_run(scheduler, job, prompts, display.say)
                protocol = scheduler.config()
                if scheduler.status().failing:
                    display.say("the run was paused because attempts failed; admitting prompts again")
                    scheduler.resume("roq up was started again")
        except BaseException:
            if server is not None and started:
                server.stop()
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            raise

        # ---- workers and trainer, until the run is over
        display.say(f"`roq watch {config_file}` shows it live, `roq board {config_file}` as a web page")
        commands = {f"worker-{i}": worker(url, job.run.name) for i in range(1, job.rollout.workers + 1)}
        commands["trainer"] = trainer(url, job.run.name, job.trainer.ranks)
        env = process_environment(config_file) | {"ROQ_REDIS": url}
        supervisor = Supervisor(folder, commands, env, display.say, restarts)
        with _Watch(
            job, protocol, server, supervisor, Scheduler(url, job.run.name, retry_s=2.0), display
        ) as watch:
            try:
                if watch.run(signals):
                    summary = watch.summary()
                else:
                    display.say("stopping: releasing unfinished work; press Ctrl-C again to kill instead")
                    killed = supervisor.stop(_grace(job), hurry=lambda: len(signals) > 1)
                    watch.look()
                    forced = f" ({', '.join(killed)} had to be killed)" if killed else ""
                    step = watch.last.version
                    display.say(f"stopped at step {step}{forced}; run `roq up {config_file}` to resume")
                    summary = None
            except RoqError:
                supervisor.stop(_grace(job))
                if server is not None:
                    server.stop()
                raise
        # Not in a `finally`: if this program fails, everything else should keep running.
        if server is not None:
            server.stop()

        # ---- results
        if summary is not None:
            write_summary(summary, folder)
            if (plot := write_summary_plot(watch.records, watch.timeline, summary, folder)) is not None:
                display.say(f"plot: {plot}")
        return summary, signals[0] if signals else 0


def down(job: Job, log: Callable[[str], None]) -> None:
    """Stop the processes of a run folder: its supervisor, workers and trainer, then its server.

    ``roq up`` can resume the run later.
    """
    folder = Path(job.run.dir)
    if (supervisor := running_supervisor(folder)) is not None:
        log(f"stopping roq up (pid {supervisor.pid})")
        send(supervisor, signal.SIGTERM)
        deadline = time.monotonic() + _grace(job) + 30
        while supervisor.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        finish(supervisor)
    running = [record for record in read_records(folder / "pids.json").values() if record.alive]
    for record in running:
        log(f"stopping {record.name} (pid {record.pid})")
    for record in stop(running, _grace(job)):
        log(f"{record.name} did not exit within {_grace(job):.0f} s and was killed")
    server = EmbeddedServer(folder)
    if server.alive:
        log("stopping the server")
        server.stop()
    log(f"run {job.run.name} is stopped on this machine; `roq up` resumes it")


def _grace(job: Job) -> float:
    """The time that processes have to exit, in seconds."""
    return max(job.rollout.shutdown_s + 10.0, TRAINER_GRACE_S)


@contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the received SIGINT and SIGTERM, instead of dying from them."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """Observe and display the run, and keep its processes and its embedded server running.

    Attributes:
        last: the last status of the run.
        records: the metrics that the processes have written.
        timeline: the run's timeline, from its events; set by :meth:`summary`.
    """

    def __init__(
        self,
        job: Job,
        protocol: RunConfig,
        server: EmbeddedServer | None,
        supervisor: Supervisor,
        scheduler: Scheduler,
        display: Display,
    ) -> None:
        self._job = job
        self._protocol = protocol
        self._server = server
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._display = display
        self._away = False
        self._server_rss: int | None = None
        self.last = Status(run=job.run.name)
        self.records = Records(job.run.dir)
        self.timeline = Timeline()

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.close()

    def run(self, signals: list[int]) -> bool:
        """Watch until the run is over or nothing but failures happens (True), or a signal came (False).

        Raises:
            RoqError: a process or the server failed for good.
        """
        self.look()
        self._show()  # earlier progress
        self._supervisor.start(self.last.version, ended=self.last.ended)
        while not (self.last.ended and self._supervisor.trainer_finished):
            if signals:
                return False
            if self.last.failing:
                break
            self._step()
        # The workers notice the end by themselves; they may still be releasing work.
        deadline = time.monotonic() + (_grace(self._job) if self.last.ended else 0.0)
        while not self._supervisor.finished and not signals and time.monotonic() < deadline:
            self._step()
        self._supervisor.stop(_grace(self._job), hurry=lambda: bool(signals))
        self.look()
        self._show()
        return True

    def _step(self) -> None:
        if self._supervisor.folder_is_gone:
            raise RoqError(
                f"{self._job.run.dir} was deleted during the run: its processes are stopped, and data stored "
                "only there is lost (logs, weights, checkpoints, an embedded server's data); "
                "start over with roq up"
            )
        self._supervisor.poll(self.last.version, self._ended)
        self.look()
        self._show()
        time.sleep(LOOK_S)

    def _ended(self) -> bool:
        self.look()
        return self.last.ended

    def look(self) -> None:
        """Update the status; while the server is unreachable, keep the last one."""
        if self._server is not None and not self._server.alive:
            self._display.say("the server has exited; restarting it on its data")
            self._server.start(self._display.say)
        try:
            self.last = self._scheduler.status()
        except ServerUnavailable as error:
            if not self._away:
                self._display.say(f"{error}; waiting for it, as workers and trainer do")
            self._away = True
            return
        if self._away:
            self._display.say("the server is back")
        self._away = False
        rss = server_rss(self._scheduler.url)
        if rss is not None:
            self._server_rss = max(rss, self._server_rss or 0)

    def _show(self) -> None:
        self.records.read()
        self._display.update(View(config=self._protocol, status=self.last, records=self.records))

    def summary(self) -> Summary:
        """Summarize the run."""
        self.records.read()
        broken = self._scheduler.verify()
        self.timeline = timeline_of(read_events(self._scheduler), self._protocol)
        return summarize(
            self.records,
            self._scheduler.status(),
            self._protocol,
            broken,
            self._server_rss,
            wait_shares(self.timeline),
        )
