"""TensorBoard and W&B get each step under prime-rl's and verl's names; their failure never stops training."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_support import read_tensorboard, read_wandb

from roq import Job
from roq.config import load_job
from roq.errors import ConfigError
from roq.job.prompts import load_prompts
from roq.job.stored import _job, _settings
from roq.types import Ledger, Status, WorkerStatus
from roq_trainer.logs import NAMES, Logs

STATUS = Status(
    ledger=Ledger(issued=10, trained=6, in_slots=2, filtered=1, discarded=1),
    workers=[
        WorkerStatus(
            worker="w0", info='{"completed": 7, "cancelled": 1, "idle_s": 2.5, "doing": "generating"}'
        ),
        WorkerStatus(worker="w1", info='{"completed": 2}'),
        WorkerStatus(worker="w2", info="not JSON"),
    ],
)
ROW = {"step": 1, "time": 1.0, "reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1,
       "staleness/counts": {"0": 3}, "mismatch_kl": 1e-3, "mismatch/abs_diff_mean": None, "replay": False,
       "time/wait_for_batch": 0.25, "time/step": 2.0, "time/export": 0.5}  # fmt: skip


def make_job(folder: Path, **logging: Any) -> Job:
    table = {
        "run": {"name": "logs", "dir": str(folder)},
        "protocol": {"eta": 1, "batch_size": 3},
        "model": {"path": "m"},
        "data": {"dataset": "gcd"},
        "logging": logging,
    }
    return msgspec.convert(table, Job)


def test_tensorboard_after_a_restart(tmp_path: Path) -> None:
    job = make_job(tmp_path, tensorboard=True)
    first = Logs(job, 0)
    for step in (1, 2, 3):
        first.write(ROW | {"step": step, "reward/mean": step / 10}, lambda: STATUS)
    again = Logs(job, 1)  # from a checkpoint at 1: 2 and 3 come again
    again.write(ROW | {"step": 2, "reward/mean": 0.7}, lambda: STATUS)
    again.close()
    found = read_tensorboard(tmp_path / "tensorboard")
    assert [(step, round(value, 3)) for step, value in found["reward/all/mean"]] == [(1, 0.1), (2, 0.7)]
    assert found["off_policy_level/all/max"][0] == (1, 1.0)
    assert found["prompts/filtered_share"][0][1] == pytest.approx(0.1)
    assert found["rollouts/cancelled_share"][0][1] == pytest.approx(0.1)
    assert found["workers/idle_s"][0][1] == 2.5
    assert found["time/broadcast_weights"][0][1] == 0.5
    assert not {"step", "time", "replay", "staleness/counts", "mismatch/abs_diff_mean"} & set(found)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = make_job(tmp_path, wandb={"project": "roq", "mode": "offline", "tags": ["a"]})
    for done in (0, 1):
        time.sleep(2.1 * done)  # W&B names its folder by the second; a trainer takes longer to start again
        logs = Logs(job, done)
        for step in (done + 1, done + 2):
            logs.write(ROW | {"step": step, "reward/mean": step / 10}, lambda: STATUS)
        logs.close()
    rows = read_wandb(tmp_path / "wandb")
    assert [(row["step"], row["reward/all/mean"]) for row in rows] == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3)]
    assert rows[0]["prompts/discarded_share"] == 0.1
    runs = {path.stem for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert runs == {"run-" + (tmp_path / "wandb-run-id").read_text()}


def test_a_logger_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING, "roq.trainer"):
        logs = Logs(make_job(tmp_path, tensorboard=True), 0)
        logs.write(ROW, lambda: STATUS)
        logs.write(ROW, lambda: STATUS)
        logs.close()
    assert [record.message.split(",")[0] for record in caplog.records] == ["TensorBoard fails"]


def test_no_logger_costs_nothing(tmp_path: Path) -> None:
    Logs(make_job(tmp_path), 0).write(ROW, lambda: pytest.fail("nobody asked"))


def test_the_section_is_checked_and_kept_with_the_run(tmp_path: Path) -> None:
    text = '[run]\nname = "x"\ndir = "run"\n[protocol]\neta = 1\nbatch_size = 2\n[model]\npath = "m"\n'
    text += '[data]\ndataset = "gcd"\nsize = 4\n[logging]\ntensorboard = true\nwandb = '
    file = tmp_path / "job.toml"
    file.write_text(text + '{ project = "p", mode = "offline" }\n')
    job = load_job(file)
    settings = _settings(job, load_prompts(job.data))
    assert _job(job.protocol, settings).logging == job.logging
    file.write_text(text + '{ project = "p", mod = "offline" }\n')
    with pytest.raises(ConfigError, match=r"logging\.wandb.*mod"):
        load_job(file)
    file.write_text(text + '{ mode = "offline" }\n')
    with pytest.raises(ConfigError, match=r"logging\.wandb.*project"):
        load_job(file)


def test_names_do_not_collide() -> None:
    assert len(set(NAMES.values())) == len(NAMES)
    assert not set(NAMES.values()) & set(NAMES)
