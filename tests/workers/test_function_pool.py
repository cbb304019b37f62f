"""Processes of users' functions: a function can fail only its own call, and the pool continues."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from roq.config import Reward
from roq.errors import ConfigError, RewardError
from roq.postprocess import Member, Verdict
from roq_worker.function_pool import PostProcess, Rewards

FUNCTIONS = """
import ctypes, os, re, signal, sys, time

def score(item, response):
    print("a function may print", flush=True)
    match item.get("do"):
        case None: return item["answer"] == response
        case "raise": raise KeyError("no such thing")
        case "meet":  # waits for another call, and returns how many run
            place = item["place"]
            open(os.path.join(place, item["name"] + ".in"), "w").close()
            while sum(name.endswith(".in") for name in os.listdir(place)) < 2: time.sleep(0.01)
            time.sleep(0.1)  # for one too many to begin
            names = os.listdir(place)
            running = sum(n.endswith(".in") for n in names) - sum(n.endswith(".out") for n in names)
            open(os.path.join(place, item["name"] + ".out"), "w").close()
            return running
        case "sleep": time.sleep(item["for"]); return 1
        case "hang": time.sleep(3600)
        case "gil": ctypes.PyDLL(None).sleep(3600)  # a C call that never releases the GIL
        case "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # so does this
        case "exit": os._exit(7)
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "nan": return float("nan")
        case "text": return "much"
        case "pid": return os.getpid()
"""

Make = Callable[..., Awaitable[Rewards]]


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    (tmp_path / "rewards_of_a_user.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)  # modules in the current directory are importable, also in the processes
    made: list[Rewards] = []

    async def make(processes: int = 1, timeout_s: float = 10.0, function: str = "score") -> Rewards:
        name = f"rewards_of_a_user:{function}"
        made.append(Rewards(Reward(function=name, processes=processes, timeout_s=timeout_s)))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"KeyError.*no such thing.*rewards_of_a_user\.py:8"),
        ("exit", r"exit code 7"),
        ("crash", r"signal 11"),
        ("nan", "nan"),
        ("text", "ValueError: could not convert string to float"),
    ],
)
async def test_a_failing_call_fails_alone(pool: Make, what: str, message: str) -> None:
    rewards = await pool()
    with pytest.raises(RewardError, match=message):
        await rewards.score({"do": what}, "")
    assert await rewards.score({"answer": "4"}, "4") == 1.0
    assert await rewards.score({"answer": "4"}, "5") == 0.0


@pytest.mark.parametrize("what", ["hang", "gil", "regex"])
async def test_a_hanging_call_is_ended_in_time(pool: Make, what: str) -> None:
    rewards = await pool(timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"0\.5 s.*reward\.timeout_s"):
        await rewards.score({"do": what}, "")
    assert time.monotonic() - began < 3
    assert await rewards.score({"answer": "4"}, "4") == 1.0


async def test_calls_run_side_by_side_and_the_rest_wait(pool: Make, tmp_path: Path) -> None:
    rewards = await pool(processes=2, timeout_s=30)
    place = tmp_path / "calls"
    place.mkdir()
    calls = ({"do": "meet", "place": str(place), "name": str(i)} for i in range(4))
    running = await asyncio.gather(*(rewards.score(call, "") for call in calls))
    assert max(running) == 2


async def test_a_hang_does_not_stop_the_other_process(pool: Make) -> None:
    rewards = await pool(processes=2, timeout_s=2)
    hanging = asyncio.create_task(rewards.score({"do": "gil"}, ""))
    await asyncio.sleep(0.05)
    for _ in range(20):
        assert await asyncio.wait_for(rewards.score({"answer": "4"}, "4"), 1) == 1.0
    with pytest.raises(RewardError, match=r"2 s.*reward\.timeout_s"):
        await hanging


async def test_a_cancelled_call_leaves_no_answer_behind(pool: Make) -> None:
    rewards = await pool()
    before = await rewards.score({"do": "pid"}, "")
    call = asyncio.create_task(rewards.score({"do": "sleep", "for": 60}, ""))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # The next call must not get the cancelled one's answer: it has another process.
    assert await rewards.score({"do": "pid"}, "") != before


async def test_large_items_go_through(pool: Make) -> None:
    rewards = await pool()
    text = "x" * 3_000_000
    assert await rewards.score({"answer": text}, text) == 1.0


async def test_a_function_that_cannot_be_imported(pool: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skore"):
        await pool(function="skore")
    (tmp_path / "rewards_of_a_user.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(ConfigError, match=r"reward\.function.*rewards_of_a_user:score"):
        await pool()


async def test_processes_end_with_the_pool(pool: Make) -> None:
    rewards = await pool()
    pid = int(await rewards.score({"do": "pid"}, ""))
    await rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_reward_that_forks_or_starts_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children end with it, its timeout holds, and a fork that returns answers nobody."""
    mark = f"roq-grandchild-{tmp_path.name}"
    (tmp_path / "forking.py").write_text(
        f"""
import os, subprocess, sys, time
def program(item, response):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)  # {mark}"])
def hang(item, response):
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
def fork(item, response):
    return 0.25 if os.fork() == 0 else item["reward"]
"""
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}:{Path.cwd()}")
    for name in ("program", "hang"):
        pool = Rewards(Reward(function=f"forking:{name}", timeout_s=1.0))
        await pool.start()
        with pytest.raises(RewardError, match=rf"forking:{name}.*reward\.timeout_s"):
            await asyncio.wait_for(pool.score({}, "x"), 10)
        await asyncio.wait_for(pool.close(), 10)
    assert mark not in "".join(" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    pool = Rewards(Reward(function="forking:fork", timeout_s=10.0))
    await pool.start()
    for reward in (0.5, 0.75, 1.0):
        assert await pool.score({"reward": reward}, "x") == reward
    await pool.close()


JUDGES = """
from roq.postprocess import Verdict

def judge(item, members):
    match item["do"]:
        case "keep": return None
        case "drop": return Verdict(keep=False, reason=f"{len(members[0].tokens)} tokens")
        case "rank": return Verdict(advantages=[m.reward * 2 for m in members])
        case "short": return Verdict(advantages=[1.0])
        case "nan": return Verdict(advantages=[float("nan")] * len(members))
        case "text": return "keep"
        case "raise": return members[9]
"""


def member(reward: float) -> Member:
    return Member(
        response="ab\ud800",  # text that is not valid Unicode
        tokens=[1, 2],
        logprobs=[-0.1, -0.2],
        segments=[(0, 1), (1, 1)],
        reward=reward,
        finish_reason="stop",
    )


@pytest.fixture
async def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PostProcess]:
    (tmp_path / "judges_of_a_user.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    pool = PostProcess("judges_of_a_user:judge", Reward())
    await pool.start()
    yield pool
    await pool.close()


async def test_verdicts(judges: PostProcess) -> None:
    members = [member(1 / 3), member(0.1 + 0.2)]
    assert await judges.judge({"do": "keep"}, members) == Verdict()
    assert await judges.judge({"do": "drop"}, members) == Verdict(keep=False, reason="2 tokens")
    assert await judges.judge({"do": "rank"}, members) == Verdict(advantages=[2 / 3, 2 * (0.1 + 0.2)])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("short", r"\[1\.0\].*\b2\b"),
        ("nan", r"\[nan, nan\].*\b2\b"),
        ("text", "str.*Verdict"),
        ("raise", r"protocol\.post_process judges_of_a_user:judge.*IndexError"),
    ],
)
async def test_verdicts_that_cannot_be(judges: PostProcess, what: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        await judges.judge({"do": what}, [member(0.0), member(1.0)])
    assert await judges.judge({"do": "keep"}, [member(0.0)]) == Verdict()


async def test_rows_of_any_kind_go_through(pool: Make) -> None:
    """Values that parquet files and reasoning-gym put into a row."""
    rewards = await pool()
    row = {
        "answer": "4",
        "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "set": {1},
        "tuple": (1, 2),
        "big": 2**80,
        "text": "\ud800",
        "numpy": [np.str_("a"), np.float32(0.5), np.int64(3)],
        "array": np.zeros(3),
        "object": object(),
    }
    assert await rewards.score(row, "4") == 1.0
