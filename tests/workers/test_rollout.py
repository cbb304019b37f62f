"""The rollout loop with a fake engine and a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roq import RunConfig, Scheduler
from roq.config import Data, Job, Model, Reward, Rollout, Run
from roq.errors import EngineError, WeightsError
from roq.job.stored import create_run
from roq.trajectory import Response
from roq.types import Batch
from roq_worker import follow, setup
from roq_worker.engine import Delta, Swapped
from roq_worker.rollout import rollout
from tests.waiting import eventually

LENGTH = 8


class PretendedEngine:
    """Sample token 1 ``LENGTH`` times, or forever while ``held``."""

    def __init__(self) -> None:
        self.version = 0
        self.tokenizer = SimpleNamespace(encode=lambda text: [2] * len(text))
        self.tokens = self.inflight = 0
        self.held = False
        self.broken = ""
        self.refusals: list[Exception] = []
        self.closed = False

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, seed: int
    ) -> AsyncGenerator[Delta, None]:
        del prompt, seed
        made = LENGTH - max_tokens
        while made < LENGTH:
            await asyncio.sleep(0.01)
            if self.held and made >= LENGTH // 2:
                continue
            made += 1
            self.tokens += 1
            yield Delta(Response([1], [-0.5], [(self.version, 1)]), "length" if made == LENGTH else None)

    async def swap(self, location: str, version: int, sender: str = "") -> Swapped:
        del location, sender
        if self.refusals:
            raise self.refusals.pop()
        self.version = version
        return Swapped(0.01, "read")

    def check(self, silent_limit_s: float) -> None:
        del silent_limit_s
        if self.broken:
            raise EngineError(self.broken)

    def finished(self, tokens: Sequence[int]) -> str | None:
        return "length" if len(tokens) >= LENGTH else None

    def decode(self, tokens: Sequence[int]) -> str:
        return "1" * len(tokens)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PretendedEngine:
    engine = PretendedEngine()

    async def start_engine(*_: object) -> PretendedEngine:
        return engine

    monkeypatch.setattr(setup, "start_engine", start_engine)
    monkeypatch.setattr(follow, "RETRY_S", (0.05,))
    return engine


@pytest.fixture
def work(sched: Scheduler, engine: PretendedEngine, tmp_path: Path) -> Callable[..., None]:
    """Create a run and work for it while ``driver`` runs in a thread."""

    def start(driver: Callable[[], object], **protocol: Any) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(9)))
        job = Job(
            run=Run(name=sched.run, dir=str(tmp_path / "run")),
            protocol=RunConfig(**({"eta": 1, "batch_size": 2, "group_size": 2, "epochs": None} | protocol)),
            model=Model(path="/nowhere"),
            data=Data(file=str(prompts), max_prompt_tokens=8),
            reward=Reward(function="roq.rewards:exact_match"),
            rollout=Rollout(max_concurrency=4, max_tokens=LENGTH),
        )
        create_run(sched, job)

        async def both() -> None:
            driving = asyncio.create_task(asyncio.to_thread(driver))
            try:
                await asyncio.wait_for(rollout(sched.url, sched.run), 60)
            finally:
                await driving

        asyncio.run(both())
        assert engine.closed
        assert not sched.verify()

    return start


def test_to_the_end_of_the_run_with_new_weights(
    sched: Scheduler, engine: PretendedEngine, work: Callable[..., None]
) -> None:
    engine.refusals = [WeightsError("too wide"), WeightsError("too wide")]
    seen: list[Any] = []

    def train() -> None:
        for step in range(3):
            batch = eventually(lambda: sched.take("trainer"))
            seen.extend(t for group in sched.trajectories(batch.groups) for t in group)
            sched.publish(step + 1, f"/weights/{step + 1}", "trainer")
            if step < 2:
                eventually(lambda step=step: engine.version == step + 1)

    work(train, total_steps=3)
    assert len(seen) == 3 * 2 * 2
    assert {len(trajectory.tokens) for trajectory in seen} == {LENGTH}
    assert max(version for trajectory in seen for version, _ in trajectory.segments) >= 1
    assert engine.refusals == []
    assert sched.status().workers == []


def test_sigterm_hands_back_the_tokens_so_far(
    sched: Scheduler, engine: PretendedEngine, work: Callable[..., None]
) -> None:
    engine.held = True

    def stop() -> None:
        eventually(lambda: engine.tokens == 4 * LENGTH // 2)
        os.kill(os.getpid(), signal.SIGTERM)

    work(stop)
    status = sched.status()
    assert (status.inflight, status.workers) == (0, [])
    prefixes = [claim.prefix for claim in sched.reserve("other", 0, 4).reservations]
    assert [len(prefix) if prefix else 0 for prefix in prefixes] == [LENGTH // 2] * 4


def test_a_drained_worker_finishes_what_it_has(
    sched: Scheduler, engine: PretendedEngine, work: Callable[..., None]
) -> None:
    engine.held = True

    def drain() -> None:
        eventually(lambda: engine.tokens == 4 * LENGTH // 2)
        sched.drain(sched.status().workers[0].worker)
        eventually(lambda: "draining" in (sched.status().workers[0].info or ""))
        engine.held = False

    work(drain, lease_s=1.0)
    status = sched.status()
    assert (status.inflight, status.workers) == (0, [])
    assert isinstance(sched.take("trainer"), Batch), "all four are in"


def test_claims_of_a_broken_engine_are_released(
    sched: Scheduler, engine: PretendedEngine, work: Callable[..., None]
) -> None:
    engine.held = True

    def fail() -> None:
        eventually(lambda: engine.tokens == 4 * LENGTH // 2)
        engine.broken = "it died"

    with pytest.raises(EngineError, match="it died"):
        work(fail)
    assert sched.status().inflight == 0
    assert engine.closed
