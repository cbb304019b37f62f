"""What the trainer could not use is refused where it is handed in."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from roq import AsyncScheduler, Invalid, RunConfig, Scheduler, Trajectory
from roq.job.model_folder import vocab_size
from roq.limits import LARGEST_REWARD, Limits
from roq.protocol import library
from tests.conftest import Server
from tests.protocol.damage import contents
from tests.protocol.play import by_hand, trajectory

JOB = {
    "model.vocab_size": "96",
    "data.max_prompt_tokens": "4",
    "rollout.max_tokens": "5",
    "trainer.max_seq_tokens": "8",
}


def response(prompt: list[int], tokens: list[int], reward: float = 1.0) -> Trajectory:
    return Trajectory(prompt, tokens, [-0.5] * len(tokens), [(0, len(tokens))], reward)


GOOD = response([95, 0], [95, 0])
BAD = {
    "vocabulary of 96": response([1], [7, 96]),
    "id 500": response([500], [7]),
    str(2**31 - 1): response([1], [2**31 - 1]),
    "max_prompt_tokens": response([1] * 5, [7]),
    "max_tokens": response([1], [7] * 6),
    "max_seq_tokens": response([1] * 4, [7] * 5),
    "reward": response([1], [7], 1.7e308),
    "-1": response([1], [7], -1.1e9),
}


@pytest.mark.parametrize("named", BAD)
def test_a_trajectory_beyond_the_limits_of_the_job(sched: Scheduler, server: Server, named: str) -> None:
    sched.create(RunConfig(eta=1, batch_size=2), settings=JOB)
    first, second = sched.reserve("w0", 0, 2).reservations
    before = contents(server.redis, "test")
    with pytest.raises(Invalid, match=re.escape(named)):
        sched.complete(first, BAD[named])
    assert contents(server.redis, "test") == before
    good, bad = sched.complete_many([(second, GOOD), (first, BAD[named])])
    assert not isinstance(good, Exception)
    assert isinstance(bad, Invalid)
    assert sched.verify() == []

    async def awaited() -> None:
        async with AsyncScheduler(server.url, "test") as client:
            with pytest.raises(Invalid, match=re.escape(named)):
                await client.complete(first, BAD[named])

    asyncio.run(awaited())
    assert sched.complete(first, GOOD).status == "occupied"


def test_without_a_job_nothing_is_known_of_the_model(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=1))
    (claim,) = sched.reserve("w0", 0, 1).reservations
    assert sched.complete(claim, response([500], [2**31 - 1] * 9)).status == "occupied"
    assert Limits().problem(response([1], [2], LARGEST_REWARD)) is None


PAYLOAD = trajectory().encode()
FORGED: dict[str, dict[str, Any]] = {
    "junk": {"payload": b"junk"},
    "empty": {"payload": b""},
    "more tokens than bytes": {"tokens": len(PAYLOAD) // 8 + 1},
    "tokens": {"tokens": 2**53 - 1},
    "no token": {"tokens": 0},
    "oldest after newest": {"oldest": 1, "newest": 0},
    "oldest": {"oldest": 2**53 - 1, "newest": 0},
    "newest": {"newest": 1},
    "reward": {"reward": 1.1e9},
    "-reward": {"reward": -1.7e308},
}


@pytest.mark.parametrize("name", FORGED)
def test_what_the_library_can_tell_by_itself(sched: Scheduler, server: Server, name: str) -> None:
    """By FCALL, without this client."""
    sched.create(RunConfig(eta=1, batch_size=1))
    (claim,) = sched.reserve("w0", 0, 1).reservations
    values = {"reward": 1.0, "tokens": 2, "oldest": 0, "newest": 0, "payload": PAYLOAD} | FORGED[name]
    before = contents(server.redis, "test")
    with pytest.raises(Exception, match="ROQ_INVALID"):
        by_hand(sched, "complete", "", claim.group, claim.member, claim.token, claim.worker, *values.values())
    assert contents(server.redis, "test") == before


def test_the_library_has_the_same_largest_reward() -> None:
    found = re.search(r"^M.LARGEST_REWARD = (\S+)", library.lua_text("lib/arguments.lua"), re.MULTILINE)
    assert found
    assert float(found[1]) == LARGEST_REWARD


def test_the_vocabulary_of_a_model(tmp_path: Path) -> None:
    assert vocab_size(str(tmp_path)) is None
    assert vocab_size("owner/model") is None
    for text, size in (
        ('{"vocab_size": 96}', 96),
        ('{"text_config": {"vocab_size": 7}, "vocab_size": 1}', 7),
        ('{"vocab_size": "x"}', None),
        ("{}", None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert vocab_size(str(tmp_path)) == size
