"""An engine of two ranks (tensor parallelism): the same guarantees, and no rank outlives its worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from roq.config import Rollout
from roq.errors import SenderSilent
from roq_worker.engine import Engine
from roq_worker.receiver import Place
from tests.conftest import environment
from tests.workers.engine_support import PROMPT, largest_difference, reference, swap_midway
from tests.workers.sender_support import Process, breaking_sender, holds

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

Models = Callable[..., Path]
Within = Callable[[Any], Any]
TWO = {"tensor_parallel_size": 2, "max_num_batched_tokens": 400}


@pytest.fixture(scope="module")
def engine(models: Models, run: Within, close: Callable[[Engine], None]) -> Iterator[Engine]:
    settings = Rollout(max_tokens=300, max_concurrency=16, temperature=0.8, engine=TWO)
    engine = run(Engine.start(str(models(seed=0)), 0, settings, dtype="float32", max_prompt_tokens=64))
    yield engine
    close(engine)


def test_weights_read_and_received(engine: Engine, models: Models, run: Within, tmp_path: Path) -> None:
    assert holds(engine, run, models(seed=0))
    drafts, _ = run(swap_midway(engine, models(seed=1), 1, count=4, after=40))
    crossed = [draft for draft in drafts if len(draft.segments) == 2]
    assert crossed
    for draft in crossed:
        (_, n), _ = draft.segments
        for seed, part in ((0, slice(0, n)), (1, slice(n, None))):
            expected = reference(models(seed=seed), PROMPT, draft.tokens)
            assert largest_difference(draft.logprobs[part], expected[part]) < 1e-4
    (tmp_path / "v00000002").symlink_to(models(seed=0))
    sender = Process(tmp_path)
    try:
        swapped = run(engine.swap("/nowhere/v00000002", 2, sender.address))
        assert (swapped.how, swapped.trouble) == ("received", "")
        assert holds(engine, run, models(seed=0))
    finally:
        sender.end()


@pytest.mark.parametrize("after", [0, 5])
def test_whatever_fails_on_one_rank_the_engine_goes_on(
    engine: Engine, models: Models, run: Within, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    version = engine.version + 1
    location = tmp_path / f"v{version:08d}"
    location.symlink_to(models(seed=version % 2))
    with breaking_sender(tmp_path, monkeypatch) as start:
        swapped = run(engine.swap(str(location), version, start(after)))
        assert swapped.how == "read"
        assert swapped.trouble
        assert holds(engine, run, models(seed=version % 2))
    # A rendezvous that fails
    with pytest.raises(SenderSilent, match=r"127\.0\.0\.1"):
        run(engine._ranks.meet(Place("gloo", "127.0.0.1", 1, "x", size=3, address="127.0.0.1")))
    again = tmp_path / f"v{version + 1:08d}"
    again.symlink_to(models(seed=(version + 1) % 2))
    run(engine.swap(str(again), version + 1))
    assert holds(engine, run, models(seed=(version + 1) % 2))


WORKER = """
import asyncio, sys
from roq.config import Rollout
from roq_worker.engine import Engine

async def main():
    settings = Rollout(max_tokens=50, max_concurrency=4, engine={"tensor_parallel_size": 2})
    engine = await Engine.start(sys.argv[1], 0, settings, dtype="float32", max_prompt_tokens=32)
    print("ready", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_rank_outlives_a_killed_worker(models: Models, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, str(program), str(models(seed=0))],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment() | {"PYTHONWARNINGS": "ignore"},
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert any(line == "ready\n" for line in worker.stdout)
        family = psutil.Process(worker.pid).children(recursive=True)
        assert len([process for process in family if "Worker" in process.name()]) == 2
        worker.kill()
    deadline = time.monotonic() + 30

    def alive() -> list[psutil.Process]:
        there = [process for process in family if process.is_running()]
        return [process for process in there if process.status() != psutil.STATUS_ZOMBIE]

    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    left = alive()
    for process in left:
        process.kill()
    assert left == []
