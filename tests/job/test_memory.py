"""The formula for a run's memory holds on both servers (docs/operations.md has the table)."""

from __future__ import annotations

import random

import msgspec
import pytest

from roq import RunConfig, Scheduler, Trajectory
from roq.job.memory import trajectories_kept, trajectory_bytes
from tests.conftest import Server
from tests.protocol.play import trajectory

PROMPT = 200


def used_memory(server: Server) -> int:
    return int(server.redis.info("memory")["used_memory"])


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("response", [64, 512, 4096])
def test_bytes_of_a_trajectory(server: Server, group: int, response: int) -> None:
    count, dice = 1024 if response < 1000 else 256, random.Random(3)
    with Scheduler(server.url, "test") as sched:
        sched.create(RunConfig(eta=1, batch_size=count // group, group_size=group))
        before = used_memory(server)
        claims = []
        while len(claims) < count:
            claims += sched.reserve("w0", 0, count - len(claims)).reservations
        for claim in claims:
            length = response + dice.randint(-response // 2, response // 2)
            tokens = [dice.randrange(150_000) for _ in range(length)]
            logprobs = [-dice.random() for _ in range(length)]
            sched.complete(claim, Trajectory(range(PROMPT), tokens, logprobs, [(0, length)], dice.random()))
        each = (used_memory(server) - before) / count
    assert 0.4 * trajectory_bytes(PROMPT, response) < each <= trajectory_bytes(PROMPT, response)


def test_how_many_are_kept() -> None:
    config = RunConfig(eta=2, batch_size=3, group_size=2, group_candidates=3, buffer_slots=4)
    assert trajectories_kept(config, checkpoint_every=5) == 3 * 4 * 3 + 5 * 3 * 2
    assert trajectories_kept(msgspec.structs.replace(config, total_steps=2), 5) == 3 * 4 * 3 + 2 * 3 * 2
    assert trajectories_kept(config, checkpoint_every=5, keep_checkpoints=2) == 3 * 4 * 3 + 10 * 3 * 2


def test_the_most_that_a_run_keeps(sched: Scheduler, server: Server) -> None:
    """Full buffers while a checkpoint is written, the batches that it covers still there: just as many."""
    every, keep, most = 4, 2, 0
    config = RunConfig(eta=2, batch_size=3, group_size=2)
    sched.create(config, weights="w")
    for version in range(16):
        if version % every == 0 and version > 0:
            most = max(most, server.redis.hlen("roq:{test}:payloads"))
            sched.checkpointed(max(0, version - (keep - 1) * every), "t0")
        fill(sched, version)
        assert sched.take("t0") is not None
        sched.publish(version + 1, "w", "t0")
        fill(sched, version + 1)
    assert most == trajectories_kept(config, every, keep)


def fill(sched: Scheduler, version: int) -> None:
    """Generate all that is admitted."""
    while claims := sched.reserve("w0", version, 32).reservations:
        for claim in claims:
            sched.complete(claim, trajectory(claim.v_traj))
