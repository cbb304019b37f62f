"""Whole worker processes with a real engine against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from roq import RunConfig, Scheduler
from roq.config import Data, Job, Model, Reward, Rollout, Run
from roq.errors import UnknownRun
from roq.job.stored import create_run
from roq.types import Batch, Status
from tests.waiting import until

pytestmark = pytest.mark.slow

START_S = 180.0  # for an engine on two busy cores; about 20 on idle ones


class Workers:
    """Start workers for one run and read their logs."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        log = (self.folder / f"worker-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", "roq_worker", "--redis", self.url, "--run", "test"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path, str(self.folder)])}
        with log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=environment, start_new_session=True
            )
        self.processes.append(process)
        return process

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("worker-*.log")))

    def until(self, what: str, happened: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """Wait until ``happened`` returns a true value, and return it."""
        return until(happened, what, timeout_s, self.log)


@pytest.fixture
def workers(servers: Callable[[str], Any], tmp_path: Path) -> Iterator[Workers]:
    server = servers("valkey")
    server.empty()
    workers = Workers(server.url, tmp_path)
    yield workers
    for process in workers.processes:
        if process.poll() is None:
            process.kill()
        process.wait(10)


@pytest.fixture
def sched(workers: Workers) -> Iterator[Scheduler]:
    with Scheduler(workers.url, "test", retry_s=5) as client:
        yield client


def job(workers: Workers, model: Path, **changes: Any) -> Job:
    prompts = workers.folder / "prompts.jsonl"
    rows = [{"prompt": f"Q: {i}+{i}=\nA: ", "answer": str(2 * i)} for i in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts: dict[str, Any] = {
        "run": Run(name="test", dir=str(workers.folder / "run"), seed=5),
        "protocol": RunConfig(eta=1, batch_size=4, group_size=2, epochs=None, lease_s=6),
        "model": Model(path=str(model)),
        "data": Data(file=str(prompts), max_prompt_tokens=32),
        "reward": Reward(function="roq.rewards:exact_match"),
        "rollout": Rollout(max_concurrency=8, max_tokens=60, shutdown_s=10),
    }
    return Job(**(parts | changes))


def take(workers: Workers, sched: Scheduler) -> Batch:
    batch = workers.until("a READY batch", lambda: sched.take("trainer"))
    assert isinstance(batch, Batch)
    return batch


def only_worker(status: Status) -> dict[str, Any]:
    return json.loads(status.workers[0].info) if len(status.workers) == 1 and status.workers[0].info else {}


def test_a_run_from_start_to_end(workers: Workers, sched: Scheduler, models: Callable[..., Path]) -> None:
    """Batches fill, new weights are loaded, unfinished work moves to another worker, the run ends."""
    rollout = Rollout(max_concurrency=8, max_tokens=400, shutdown_s=10, save_prefix_every_s=1.0)
    protocol = RunConfig(eta=1, batch_size=4, group_size=2, epochs=None, lease_s=6, total_steps=4)
    create_run(sched, job(workers, models(seed=0, spare=2000), rollout=rollout, protocol=protocol))
    first = workers.start()

    # A whole batch, with everything that a trainer needs.
    batch = take(workers, sched)
    assert [group.staleness for group in batch.groups] == [0] * 4
    for group in sched.trajectories(batch.groups):
        one, other = group
        assert one.prompt == other.prompt
        assert one.tokens != other.tokens, "members have seeds of their own"
        for trajectory in group:
            assert trajectory.segments == [(0, len(trajectory.tokens))]
            assert trajectory.reward in (0.0, 1.0)
            ended = trajectory.tokens[-1] == 1
            assert trajectory.finish_reason == ("stop" if ended else "length")
            assert ended or len(trajectory.tokens) == 400

    # Weights that do not fit are reported and the old ones kept in use; good ones are taken.
    sched.publish(1, str(models(seed=1, intermediate_size=96, spare=2000)), "trainer")
    workers.until("the report", lambda: "do not fit" in only_worker(sched.status()).get("error", ""))
    assert sched.status().workers[0].version == 0
    take(workers, sched)
    sched.publish(2, str(models(seed=1, spare=2000)), "trainer")
    workers.until("work for v2", lambda: sched.status().inflight >= 8)

    # SIGTERM: everything in flight is released with the tokens so far.
    time.sleep(0.5)
    first.terminate()
    assert first.wait(15) == 0, workers.log()
    status = sched.status()
    assert (status.inflight, status.workers) == (0, [])
    assert status.pending >= 3, "some may have finished in time"
    assert not sched.verify()
    handed_back = {}
    for claim in sched.reserve("probe", 2, 16).reservations:
        if claim.prefix is not None:  # None: no token yet, or never issued
            handed_back[claim.ordinal, claim.member] = claim.prefix
    assert len(handed_back) >= 3
    sched.leave("probe")
    (metrics,) = (workers.folder / "run/workers").iterdir()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[-1]["done"] is True
    assert lines[-1]["released"] >= len(handed_back)
    assert (lines[-1]["version"], lines[-1]["swaps"]) == (2, 1)
    assert lines[-1]["rss_bytes"] < 2e9
    assert lines[-1]["scheduler_s"] > 0

    # Another worker continues them, token by token.
    second = workers.start()
    batch = take(workers, sched)
    went_on = 0
    for place, group in zip(batch.groups, sched.trajectories(batch.groups), strict=True):
        for member, trajectory in zip(place.members, group, strict=True):
            if prefix := handed_back.get((place.ordinal, member.member)):
                assert trajectory.tokens[: len(prefix)] == prefix.tokens
                assert trajectory.logprobs[: len(prefix)] == prefix.logprobs
                went_on += 1
    assert went_on >= 1

    # The last step ends the run, and with it the worker.
    sched.publish(3, str(models(seed=0, spare=2000)), "trainer")
    take(workers, sched)
    sched.publish(4, str(models(seed=1, spare=2000)), "trainer")
    assert second.wait(30) == 0, workers.log()
    assert not sched.verify()
    assert sched.status().workers == []


def test_post_processing_without_partial_rollout(
    workers: Workers, sched: Scheduler, models: Callable[..., Path]
) -> None:
    """The user's function gets whole groups; no response has two versions; a drained worker leaves."""
    (workers.folder / "judges.py").write_text(
        "from roq.postprocess import Verdict\n"
        "def judge(item, members):\n"
        "    which = int(item['answer']) // 2 % 4\n"
        "    assert all(len(m.tokens) == len(m.logprobs) for m in members)\n"
        "    if which == 0: return Verdict(keep=False, reason='dull')\n"
        "    if which == 1: raise ValueError('no such judge')\n"
        "    return Verdict(advantages=[float(len(m.tokens)) for m in members])\n"
    )
    protocol = RunConfig(
        eta=1, batch_size=4, group_size=2, epochs=None, lease_s=6, max_attempts=2, post_process="judges:judge"
    )
    rollout = Rollout(max_concurrency=8, max_tokens=200, shutdown_s=10, partial_rollout=False)
    create_run(sched, job(workers, models(seed=0), protocol=protocol, rollout=rollout))
    worker = workers.start()
    versions: set[int] = set()
    for version in range(3):
        batch = take(workers, sched)
        for group, trajectories in zip(batch.groups, sched.trajectories(batch.groups), strict=True):
            assert [m.advantage for m in group.members] == [len(t.tokens) for t in trajectories]
            assert all(len(t.segments) == 1 for t in trajectories), "one version each"
            versions |= {t.segments[0][0] for t in trajectories}
        sched.publish(version + 1, str(models(seed=version % 2)), "trainer")
    assert len(versions) >= 2
    ledger = sched.status().ledger
    assert ledger.filtered > 0
    assert ledger.dead > 0
    assert all("judges:judge raised ValueError: no such judge" in letter.reason for letter in sched.dead())

    name = sched.status().workers[0].worker
    sched.drain(name)
    assert worker.wait(30) == 0, workers.log()
    assert "stopping (drained)" in workers.log()
    status = sched.status()
    assert (status.workers, status.inflight) == ([], 0)
    assert not sched.verify()
    assert not sched.audit().problems


def test_candidates_that_are_not_needed_are_stopped(
    workers: Workers, sched: Scheduler, models: Callable[..., Path]
) -> None:
    """The engine stops them: otherwise they would occupy capacity until their full length."""
    protocol = RunConfig(eta=0, batch_size=2, group_size=1, group_candidates=4, epochs=None, lease_s=60)
    rollout = Rollout(max_concurrency=8, max_tokens=470, shutdown_s=10)
    create_run(sched, job(workers, models(seed=0), protocol=protocol, rollout=rollout))
    workers.start()
    batch = take(workers, sched)
    assert [len(group.members) for group in batch.groups] == [1, 1]
    assert sched.status().inflight == 0

    def last_line() -> dict[str, Any]:
        (metrics,) = (workers.folder / "run/workers").iterdir()
        return json.loads(metrics.read_text().splitlines()[-1])

    # far sooner than the next heartbeat of a lease of 60 s
    workers.until("an idle engine", lambda: last_line()["completed"] and last_line()["inflight"] == 0, 12)
    assert last_line()["cancelled"] > 0
    assert not sched.verify()


def test_failures(workers: Workers, sched: Scheduler, models: Callable[..., Path]) -> None:
    """Failing rewards, a frozen worker that loses its claims, a dead engine, an orphaned engine."""
    (workers.folder / "moody_rewards.py").write_text(
        "import time\n"
        "def score(item, response):\n"
        "    which = int(item['answer']) % 6\n"
        "    if which == 0: raise ValueError('no zero')\n"
        "    if which == 2: time.sleep(3600)\n"
        "    return 1.0\n"
    )
    reward = Reward(function="moody_rewards:score", timeout_s=0.5, processes=2)
    protocol = RunConfig(eta=1, batch_size=4, group_size=2, epochs=None, lease_s=4, max_attempts=2)
    create_run(sched, job(workers, models(seed=0), reward=reward, protocol=protocol))
    worker = workers.start()

    # Failed attempts are never rewards: everything in the batches was scored.
    batch = take(workers, sched)
    for group, place in zip(sched.trajectories(batch.groups), batch.groups, strict=True):
        assert [trajectory.reward for trajectory in group] == [1.0, 1.0], place
    workers.until("dead letters", lambda: sched.status().ledger.dead)
    workers.until("a timeout", lambda: "took longer than 0.5 s" in workers.log())
    workers.until("an exception", lambda: "raised ValueError: no zero" in workers.log())
    assert not sched.verify()

    # Frozen longer than its lease: it loses its claims; after waking it drops them and continues.
    sched.publish(1, str(models(seed=0)), "trainer")
    workers.until("work", lambda: sched.status().inflight)
    group = [worker.pid, *(child.pid for child in psutil.Process(worker.pid).children(recursive=True))]
    for pid in group:
        os.kill(pid, signal.SIGSTOP)
    workers.until("the loss", lambda: sched.reserve("other", 1, 8).reservations, 15)
    sched.leave("other")
    for pid in group:
        os.kill(pid, signal.SIGCONT)
    batch = take(workers, sched)
    assert batch.version == 1
    assert not sched.verify()

    # The engine dies: its claims are released, and the process ends with a one-line error.
    engine = next(
        c
        for c in psutil.Process(worker.pid).children(recursive=True)
        if "EngineCore" in c.name() or "VLLM" in c.name()
    )
    engine.kill()
    assert worker.wait(20) == 1, workers.log()
    assert "engine process died" in workers.log().splitlines()[-1]
    assert sched.status().inflight == 0

    # Killed with -9, its engine and reward processes go too.
    worker = workers.start()
    workers.until("work", lambda: sched.status().inflight)
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(children) >= 3
    worker.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_input_that_cannot_work(workers: Workers, sched: Scheduler, models: Callable[..., Path]) -> None:
    """A one-line error on stderr and exit code 2, before an engine is started."""
    process = workers.start()
    assert process.wait(60) == UnknownRun.exit_code
    assert "test" in workers.log()
    assert "Traceback" not in workers.log()

    good = job(workers, models(seed=0))
    create_run(sched, good)
    rows = Path(str(good.data.file))
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join(lines[::-1]))
    process = workers.start()
    assert process.wait(60) == 2
    assert "are not the 40 of the run" in workers.log().splitlines()[-1]

    rows.write_text("\n".join([*lines[:2], "{broken"]))
    process = workers.start()
    assert process.wait(60) == 2
    assert "prompts.jsonl, line 3: not valid JSON" in workers.log().splitlines()[-1]
    assert "Traceback" not in workers.log()
    assert sched.status().workers == []
