"""The training loop with a real server: it trains, is killed, resumes, and reports why it cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from player import playing
from trainer_support import TEMPERATURE, environment, read_tensorboard, read_wandb

from roq import Job, Scheduler, Trajectory
from roq.job.stored import create_run
from roq.processes import start_mark
from roq.protocol.keys import keys_of
from roq.run.up import trainer_command
from roq.weights import fetch
from roq.weights.safetensors import check_weights
from tests.protocol.play import by_hand, direct
from tests.waiting import eventually, until

pytestmark = pytest.mark.slow

KEYS = {
    "step", "time", "reward/mean", "reward/std", "staleness/mean", "staleness/max", "staleness/counts",
    "groups", "trajectories", "tokens/response", "tokens/prompt", "response_length/mean",
    "response_length/max", "loss", "grad_norm", "clip_fraction", "mismatch_kl", "mismatch/outlier_share",
    "mismatch/abs_diff_mean", "mismatch/abs_diff_tokens", "importance/mean", "importance/truncated_share",
    "time/wait_for_batch", "time/fetch", "time/logprob", "time/train", "time/export", "time/checkpoint",
    "time/step", "scheduler_s", "wall_s", "rss_bytes", "replay",
}  # fmt: skip


@dataclasses.dataclass
class Setup:
    """A run on a server, and its trainer process."""

    url: str
    job: Job

    @property
    def dir(self) -> Path:
        return Path(self.job.run.dir)

    def connect(self) -> Scheduler:
        return Scheduler(self.url, self.job.run.name, retry_s=10)

    def start(self) -> subprocess.Popen[str]:
        with (self.dir / "trainer.log").open("a") as log:
            return subprocess.Popen(
                trainer_command(self.url, self.job.run.name, self.job.trainer.ranks),
                env=environment(), stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> str:
        return (self.dir / "trainer.log").read_text()

    def until(self, what: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 60) -> None:
        def reached() -> bool:
            done = what()
            assert done or process.poll() is None, self.log()
            return done

        until(reached, "the trainer", timeout, self.log)


@pytest.fixture
def prepare(servers: Callable[[str], Any], models: Path, tmp_path: Path) -> Callable[..., Setup]:
    """Create a run with a job; keyword arguments change ``[protocol]`` and ``[trainer]``."""

    def prepare(
        protocol: dict[str, Any] | None = None,
        kind: str = "qwen3-untied",
        logging: dict[str, Any] | None = None,
        store: str | None = None,
        **training: Any,
    ) -> Setup:
        server = servers("valkey")
        server.empty()
        rows = tmp_path / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(200)))
        table = {
            "run": {"name": "loop", "dir": str(tmp_path), "weights": store},
            "protocol": {"eta": 1, "batch_size": 3, "group_size": 4, "total_steps": 4, "lease_s": 30}
            | (protocol or {}),
            "model": {"path": str(models / kind)},
            "data": {"file": str(rows), "max_prompt_tokens": 16},
            "rollout": {"max_tokens": 16, "temperature": TEMPERATURE},
            "trainer": {"lr": 1e-3, "micro_batch_size": 5, "max_seq_tokens": 32, "checkpoint_every": 3}
            | training,
            "logging": logging or {},
        }
        setup = Setup(server.url, msgspec.convert(table, Job))
        with setup.connect() as sched:
            create_run(sched, setup.job)
        return setup

    return prepare


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [({}, "qwen3-untied"), ({"data_parallel": 2}, "qwen3-tied"), ({"tensor_parallel": 2}, "qwen3-tied")],
)
def test_trains_to_the_end(prepare, ranks: dict[str, int], kind: str) -> None:
    loggers = {"tensorboard": True, "wandb": {"project": "x", "mode": "offline"}} if not ranks else {}
    setup = prepare(kind=kind, keep_weights=1, logging=loggers, **ranks)
    trainer = setup.start()
    with playing(setup.connect):
        assert trainer.wait(90) == 0, setup.log()
    with setup.connect() as sched:
        status = sched.status()
        assert sched.verify() == []
    assert (status.version, status.ended, status.checkpoint, status.ledger.trained) == (4, True, 3, 12)
    assert status.ledger.balanced

    lines = setup.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(line) == KEYS
        assert (line["groups"], line["trajectories"], line["replay"]) == (3, 12, False)
        assert line["staleness/max"] <= 1
        assert sum(line["staleness/counts"].values()) == 12
        assert line["tokens/prompt"] == 12 * 4
        assert line["clip_fraction"] == 0
        assert line["grad_norm"] > 0
        assert line["rss_bytes"] < 2 << 30
    assert "step 1: reward" in setup.log()
    assert "continuing without" not in setup.log()
    if loggers:
        board = read_tensorboard(setup.dir / "tensorboard")["mismatch_kl/all/mean"]
        assert board == [(line["step"], pytest.approx(line["mismatch_kl"])) for line in lines]
        rows = read_wandb(setup.dir / "wandb")
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        waits = [line["time/wait_for_batch"] for line in lines]
        assert [row["time/wait_for_batch"] for row in rows] == waits
    same = [line for line in lines if line["mismatch/abs_diff_tokens"]]
    assert same, "no token was sampled with the version being trained"
    assert max(line["mismatch/abs_diff_mean"] for line in same) < 1e-5
    assert any(line["staleness/counts"].get("1") for line in lines)
    assert lines[-1]["scheduler_s"] < 0.5
    assert sorted(path.name for path in (setup.dir / "checkpoints").iterdir()) == [
        "step_00000003",
        "step_00000004",
    ]
    kept = sorted(path.name for path in (setup.dir / "weights").glob("v*"))
    with setup.connect() as sched:
        newest = Path(sched.weights()[-1].location)
    assert newest == setup.dir / "weights" / kept[-1]
    assert re.fullmatch(r"v00000004-[0-9a-f]{8}", newest.name)
    assert len(kept) <= 2  # the newest, and one that the worker may still have pinned
    assert Path(setup.job.model.path).is_dir()
    assert (newest / "model.safetensors").stat().st_mode & 0o044, "workers that are other users read it too"


def poison(sched: Scheduler) -> dict[int, str]:
    """Hand in two batches of which five groups cannot be trained, by FCALL; what is wrong with each."""
    claims = sched.reserve("stranger", 0, 24).reservations
    good = Trajectory([1, 2], [3, 4], [-1.0, -1.0], [(0, 2)], 0.5)
    long = 17
    payloads = {
        1: Trajectory([1, 2], [3, 96], [-1.0, -1.0], [(0, 2)], 0.5),
        2: Trajectory([1, 500], [3, 4], [-1.0, -1.0], [(0, 2)], 0.5),
        4: Trajectory([1, 2], [3] * long, [-1.0] * long, [(0, long)], 0.5),
    }
    for claim in claims:
        payload = payloads.get(claim.group, good) if claim.member == 3 else good
        data = b"\x80" * 200 if (claim.group, claim.member) == (5, 3) else payload.encode()
        values = (payload.reward, len(payload), 0, 0, data)
        by_hand(sched, "complete", "", claim.group, claim.member, claim.token, claim.worker, *values)
    with direct(sched) as client:  # the library refuses such a reward: into the record, as a worker may
        groups = keys_of(sched.run)["groups"]
        record = client.hget(groups, "3").decode()
        client.hset(groups, "3", record.replace('"reward":"0.5"', '"reward":"1.7e308"'))
    return {1: "token id 96 ", 2: "token id 500 ", 3: "reward", 4: "max_tokens = 16", 5: "not an encoded"}


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel": 2}, {"data_parallel": 2}])
def test_what_cannot_be_trained_leaves_the_batch(prepare, ranks: dict[str, int]) -> None:
    """A worker with another tokenizer, or worse: named and replaced, and the run goes on in one start."""
    setup = prepare(protocol={"total_steps": 3}, kind="qwen3-tied", **ranks)
    with setup.connect() as sched:
        wrong = poison(sched)
        trainer = setup.start()
        with playing(setup.connect):
            assert trainer.wait(90) == 0, setup.log()
        status = sched.status()
        assert sched.verify() == []
        assert sched.audit().problems == []
    assert (status.version, status.ended, status.ledger.trained) == (3, True, 9)
    assert status.ledger.balanced
    for group, reason in wrong.items():
        (line,) = [line for line in setup.log().splitlines() if f"group {group} of batch" in line][:1]
        assert "by worker stranger: " in line
        assert reason in line
    assert [line["step"] for line in setup.lines()] == [1, 2, 3]


def test_ranks_end_with_torchrun(prepare) -> None:
    """Killed with -9, torchrun leaves no rank behind that would train next to its successor's."""
    setup = prepare(data_parallel=2)
    agent = setup.start()
    found: list[psutil.Process] = []

    def ranks() -> bool:
        found[:] = psutil.Process(agent.pid).children()
        return len(found) == 2 and "2 ranks" in setup.log()

    setup.until(ranks, agent)
    agent.kill()
    agent.wait()
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not alive


def test_a_stopped_and_a_killed_trainer_go_on_where_they_were(prepare) -> None:
    setup = prepare(protocol={"total_steps": 8}, checkpoint_every=5)
    with playing(setup.connect):
        trainer = setup.start()
        setup.until(lambda: len(setup.lines()) >= 2, trainer)
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(30) == 0, setup.log()
        assert "start the trainer again to resume" in setup.log()
        first = len(setup.lines())

        trainer = setup.start()
        setup.until(lambda: len(setup.lines()) >= first + 3, trainer)
        trainer.kill()
        trainer.wait(30)

        trainer = setup.start()
        assert trainer.wait(90) == 0, setup.log()
    with setup.connect() as sched:
        status = sched.status()
        assert sched.verify() == []
    assert (status.version, status.checkpoint, status.ledger.trained) == (8, 5, 24)
    lines = setup.lines()
    assert {line["step"] for line in lines} == set(range(1, 9))
    assert any(line["replay"] for line in lines)
    originals = {line["step"]: line for line in reversed(lines)}
    for line in lines:  # the same batch, trained from the same weights: the same metrics
        original = originals[line["step"]]
        for key in ("reward/mean", "tokens/response", "loss", "grad_norm", "mismatch_kl"):
            assert line[key] == pytest.approx(original[key], rel=1e-6, abs=1e-9)
    assert not list(setup.dir.glob("*/.tmp-*"))

    again = setup.start()  # nothing is left to do, and it logs that
    assert again.wait(60) == 0
    assert setup.log().count("the run has ended after step 8") == 2


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(prepare) -> None:
    """The newest is cut short by its disk: the run continues from an older one, with the same batches."""
    setup = prepare(protocol={"total_steps": 8}, checkpoint_every=2)
    with playing(setup.connect):
        trainer = setup.start()
        setup.until(lambda: len(setup.lines()) >= 5, trainer)
        trainer.kill()
        trainer.wait(30)
        newest = max((setup.dir / "checkpoints").glob("step_*"))
        data = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
        data.write_bytes(data.read_bytes()[:-100])
        trainer = setup.start()
        assert trainer.wait(90) == 0, setup.log()
    assert f"{newest} is damaged: {data.name} has" in setup.log()
    with setup.connect() as sched:
        status = sched.status()
        assert sched.verify() == []
    assert (status.version, status.ledger.trained) == (8, 24)
    lines = setup.lines()
    replayed = [line for line in lines if line["replay"]]
    assert replayed[0]["step"] == int(newest.name[-8:]) - 1, "from the checkpoint before it"
    originals = {line["step"]: line for line in reversed(lines)}
    for line in replayed:
        assert line["loss"] == pytest.approx(originals[line["step"]]["loss"], rel=1e-6, abs=1e-9)
    assert (setup.dir / "checkpoints" / f"damaged-{newest.name}").is_dir()


@pytest.mark.parametrize("kind", ["", "file://"])
def test_weights_of_a_trainer_that_is_killed(
    prepare, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder and in an object store: lost weights are written again at their registered location;
    what the killed one left goes, whatever its name.
    """
    monkeypatch.setenv("ROQ_CACHE", str(tmp_path / "cache"))
    store = tmp_path / "objects" / "run"
    setup = prepare(protocol={"total_steps": 6}, checkpoint_every=2, keep_weights=1, store=f"{kind}{store}")
    with playing(setup.connect):
        trainer = setup.start()
        setup.until(lambda: len(setup.lines()) >= 3, trainer)
        trainer.kill()
        trainer.wait(30)
        with setup.connect() as sched:
            newest = sched.pin("someone")
        assert re.fullmatch(rf"{kind}{store}/v{newest.version:08d}-[0-9a-f]{{8}}", newest.location)
        lost = Path(newest.location.removeprefix(kind)) / "model.safetensors"
        lost.unlink()
        # Unregistered and never deleted; exported and never published; a user's copy.
        names = ("v00000001-0badcafe", f"v{newest.version + 1:08d}-0badcafe", "v00000001-best")
        left = [store / name for name in names]
        for folder in left:
            shutil.copytree(lost.parent, folder)

        trainer = setup.start()
        setup.until(lost.exists, trainer)
        assert not left[0].exists()
        assert trainer.wait(90) == 0, setup.log()
    with setup.connect() as sched:
        last = sched.weights()[-1]
    assert last.version == 6
    with fetch(last.location) as folder:
        check_weights(folder)
    assert not list((setup.dir / "weights").glob("*")), "what was stored does not stay on the trainer's disk"
    assert not left[1].exists()
    assert left[2].exists()
    assert len(list(store.glob("v*"))) <= 4


def test_says_what_it_waits_for_and_gives_up_when_no_worker_lives(prepare) -> None:
    setup = prepare(protocol={"eta": 0}, worker_timeout_s=2.0)
    with setup.connect() as sched:
        sched.renew("w0", 0)
        reservation = sched.reserve("w0", 0, 1).reservations[0]
        sched.fail(reservation, "reward exploded")
        sched.reserve("w0", 0, 1)
        trainer = setup.start()
        setup.until(lambda: sched.status().trainer != "", trainer)
        sched.renew("w0", 0)
        time.sleep(1)
        sched.leave("w0")
        assert trainer.wait(60) == 1
    last = setup.log().splitlines()[-1]
    assert "no live worker for" in last
    assert "batch 0: 0 of 3 groups done, 1 unfinished, 2 slots empty" in last
    assert "no worker" in last
    assert "reward exploded" in last


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3}, "the job needs 3 trainer ranks"),
        ({"max_seq_tokens": 31}, "trainer.max_seq_tokens = 31 is less than"),
    ],
)
def test_a_job_that_cannot_work_is_one_line_and_exit_2(
    prepare, changes: dict[str, int], message: str
) -> None:
    setup = prepare(**changes)
    done = subprocess.run(
        [sys.executable, "-m", "roq_trainer", "--redis", setup.url, "--run", "loop"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("roq-trainer: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_what_a_rank_forks_ends_with_it(tmp_path: Path) -> None:
    """Megatron forks processes to write a checkpoint; a killed trainer must not leave them behind."""
    program = """
import os, sys, time, types

def train(url, run, address):
    if (child := os.fork()) == 0:
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)

sys.modules["roq_trainer.train"] = types.SimpleNamespace(train=train)
from roq_trainer.__main__ import main
main(["--redis", "redis://nowhere", "--run", "r"])
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(child, 0)
        process.kill()
    eventually(lambda: start_mark(child) is None, 10)
