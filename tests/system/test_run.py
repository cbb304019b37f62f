"""The whole line with every real part: ``roq up`` with an embedded server, vLLM workers and Megatron."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roq import Scheduler
from roq.processes import read_records
from roq.run.embedded_server import EmbeddedServer
from tests.system.conftest import JOB, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def roq(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from roq.cli import main; main(prog_name='roq')", *arguments]


Start = Callable[..., tuple[Path, "subprocess.Popen[bytes]"]]


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Any:
    """Start ``roq up`` on a small job; whatever still runs at the end is taken down."""
    (tmp_path / "base").symlink_to(base)
    config = tmp_path / "job.toml"

    def run(**settings: object) -> tuple[Path, subprocess.Popen[bytes]]:
        defaults: dict[str, object] = {"steps": 4, "workers": 2, "lease_s": 20, "kv": "recompute"}
        defaults |= {"batch": 4, "protocol": "", "transfer": "files", "trainer": ""}
        config.write_text(JOB.format(**defaults | settings))
        with (tmp_path / "up.log").open("wb") as log:
            return tmp_path / "run", subprocess.Popen(roq("up", str(config)), stdout=log, stderr=log)

    yield run
    subprocess.run(roq("down", str(config)), check=False, timeout=60)


def finished(folder: Path, process: subprocess.Popen[bytes], steps: int, batch: int = 4) -> dict[str, Any]:
    """Wait for the end; what must hold of every run."""
    log = folder.parent / "up.log"
    assert process.wait(400) == 0, log.read_text()[-4000:]
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (folder / "summary.png").stat().st_size > 10_000
    assert summary["steps"] == summary["batches_full"] == steps
    assert summary["eta"] == 1
    assert summary["max_staleness"] <= 1
    assert sum(summary["staleness_histogram"].values()) == steps * batch * 4
    ledger = summary["ledger"]
    assert ledger["trained"] == steps * batch
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    assert summary["verify"] == []
    assert summary["logprob_abs_diff_mean"] < 1e-3
    server = EmbeddedServer(folder)
    server.start()
    try:
        with Scheduler(server.url, "e2e") as sched:
            assert sched.verify() == []
            audit = sched.audit()
        assert audit.problems == []
        assert audit.fates["trained"] == steps * batch
    finally:
        server.stop()
    return summary


def test_trains_to_the_end(start: Start) -> None:
    folder, process = start(kv="keep")
    summary = finished(folder, process, 4)
    assert summary["worker_processes"] == 2
    assert summary["tokens_per_s"] > 0


def test_over_sampling_of_both_kinds(start: Start) -> None:
    """Groups of 4 of 5 candidates, batches of 8 of 9 slots, post-processed before they are placed."""
    protocol = """
buffer_slots = 9
group_candidates = 5
post_process = "roq.postprocess:leave_one_out"
"""
    folder, process = start(steps=3, batch=8, protocol=protocol)
    summary = finished(folder, process, 3, batch=8)
    lines = [line for path in (folder / "workers").iterdir() for line in path.read_text().splitlines()]
    log = [json.loads(line) for line in lines]
    last = {line["worker"]: line for line in log}
    assert sum(line["cancelled"] for line in last.values()) > 0, "the fifth candidates are stopped"
    assert sum(line["post_processed"] for line in last.values()) >= 24
    assert summary["ledger"]["issued"] >= 24


def test_kill_each_process_once(start: Start) -> None:
    """kill -9 of a vLLM worker, the server, the trainer and the supervisor: nothing is lost."""
    steps = 10
    folder, process = start(steps=steps, lease_s=4)
    metrics = folder / "metrics.jsonl"

    def trained() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def kill(name: str) -> None:
        record = read_records(folder / "pids.json")[name]
        assert record.alive
        os.kill(record.pid, signal.SIGKILL)

    until(lambda: trained() >= 1, "the first step")
    kill("worker-1")
    until(lambda: trained() >= 3, "steps after the death of a worker")
    EmbeddedServer(folder).kill()
    until(lambda: trained() >= 5, "steps after the death of the server")
    kill("trainer")
    until(lambda: trained() >= 7, "steps after the death of the trainer")
    process.kill()
    process.wait()
    summary = finished(*start(steps=steps, lease_s=4), steps)
    assert summary["worker_processes"] >= 3
    assert summary["trainer_processes"] >= 2
