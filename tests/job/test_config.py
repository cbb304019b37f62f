"""Configurations and trajectories that cannot be are refused by name, wherever they are built."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest

from roq import ConfigError, RoqError, RunConfig, Scheduler
from roq.client.failures import is_transient
from roq.config import Reward, load_job
from tests.conftest import Server
from tests.protocol.play import trajectory

JOB = Path(__file__).parents[2] / "examples" / "gcd.toml"


@pytest.mark.parametrize(
    "bad",
    [
        {"eta": -1},
        {"eta": 1000},
        {"eta": 10**30},
        {"eta": "x"},
        {"eta": None},
        {"batch_size": 0},
        {"batch_size": 100_000},
        {"group_size": 0},
        {"lease_s": -1},
        {"lease_s": float("nan")},
        {"stuck_timeout_s": float("inf")},
        {"on_drop": "zzz"},
        {"event_log": 0},
        {"max_attempts": 0},
        {"prompts": 0},
    ],
    ids=str,
)
def test_a_configuration_built_in_python_is_checked(sched: Scheduler, bad: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError), match=next(iter(bad))):
        sched.create(RunConfig(**{"eta": 1, "batch_size": 2} | bad))
    assert not sched._driver.redis.exists(sched._operations.keys["config"])


@pytest.mark.parametrize("settings", [{"a.b": None}, {"a.b": {"x": 1}}, {"eta": "7"}])
def test_settings_are_text_with_a_dot_in_their_names(sched: Scheduler, settings: Any) -> None:
    with pytest.raises(ConfigError):
        sched.create(RunConfig(eta=1, batch_size=2), settings=settings)
    assert not sched._driver.redis.exists(sched._operations.keys["config"])


def test_reasons_of_every_kind(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=8, on_drop="discard", max_attempts=100))
    for reason in ("", "\0x", " ", "two words", "b\udcff", "x" * 5_000_000):
        claim = sched.reserve("w", 0, 1).reservations[0]
        sched.drop(claim.group, reason)
        assert [told.group for told in sched.renew("w").cancelled] == [claim.group]
        claim = sched.reserve("w", 0, 1).reservations[0]
        sched.fail(claim, reason)
        assert len(sched.status().workers[0].error) <= 2000
    assert sched.verify() == []


def _reserve(sched: Scheduler, out: Any) -> None:
    out.put([claim.token for claim in sched.reserve(f"w{os.getpid()}", 0, 2).reservations])


def test_a_fork_is_another_client(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=64))
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    children = [context.Process(target=_reserve, args=(sched, out)) for _ in range(2)]
    for child in children:
        child.start()
    tokens = [token for _ in children for token in out.get(timeout=20)]
    for child in children:
        child.join()
    tokens += [claim.token for claim in sched.reserve("parent", 0, 2).reservations]
    assert len(set(tokens)) == 6


def test_options_of_the_url(server: Server) -> None:
    with Scheduler(f"{server.url}?decode_responses=True", "u", retry_s=1) as sched:
        sched.create(RunConfig(eta=1, batch_size=1))
        sched.complete(sched.reserve("w", 0, 1).reservations[0], trajectory())
        batch = sched.take("t")
        assert batch is not None
        assert sched.trajectories(batch.groups)
    with pytest.raises(ConfigError):
        Scheduler("redis://h?foo=1", "u")


def test_messages_do_not_show_the_password() -> None:
    with Scheduler("redis://user:s3cret@127.0.0.1:1", "u", retry_s=0.1) as sched:
        with pytest.raises(RoqError) as refused:
            sched.status()
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("code", ["BUSY", "MISCONF", "NOREPLICAS", "LOADING", "OOM"])
def test_errors_that_pass(code: str) -> None:
    from redis import ResponseError

    assert is_transient(ResponseError(f"{code} the server cannot now"))
    assert not is_transient(ResponseError("WRONGTYPE it never will"))


def test_surplus_is_cancelled_to_the_last(sched: Scheduler) -> None:
    """Also where the run's last step ends the window, and in portions where there is much of it."""
    sched.create(RunConfig(eta=5, batch_size=1, buffer_slots=3, total_steps=2))
    claims = sched.reserve("w", 0, 6).reservations
    for claim in claims[:2]:
        sched.complete(claim, trajectory())
    assert len(sched.renew("w").cancelled) == 4
    with Scheduler(sched.url, "large") as large:
        large.create(RunConfig(eta=0, batch_size=1, buffer_slots=200))
        held = large.reserve("w", 0, 200).reservations
        large.complete(held[0], trajectory())
        for _ in range(13):
            large.renew("w")
        assert large.status().inflight == 0
        assert large.verify() == []


def test_the_stuck_timeout_drops_all_that_was_there(sched: Scheduler) -> None:
    import time

    sched.create(RunConfig(eta=0, batch_size=40, stuck_timeout_s=0.2, on_drop="discard"))
    sched.reserve("w", 0, 40)
    sched.take("t1")
    time.sleep(0.3)
    assert sched.take("t2") is None  # which begins to wait only now
    assert sched.status().ledger.in_slots == 40
    time.sleep(0.3)
    for _ in range(4):
        sched.take("t2")
    assert sched.status().ledger.discarded == 40
    assert sched.verify() == []


@pytest.mark.parametrize("name", ["a:b\n", "..:x", "a:", ":b", "a.b", "a:b:c", "1a:b", "a b:c", "a:b.c"])
def test_names_of_functions_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError):
        RunConfig(eta=1, batch_size=1, post_process=name).checked()
    with pytest.raises(ValueError, match="module:function"):
        Reward(function=name)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("run.transfer", "'files', 'nccl', 'gloo'"),
        ("protocol.on_drop", "'requeue', 'discard'"),
        ("rollout.kv_on_swap", "'recompute', 'keep'"),
    ],
)
def test_a_wrong_choice_names_the_right_ones(tmp_path: Path, key: str, choices: str) -> None:
    section, name = key.split(".")
    lines = [line for line in JOB.read_text().splitlines() if not line.startswith(f"{name} ")]
    lines.insert(lines.index(f"[{section}]") + 1, f'{name} = "typo"')
    (tmp_path / "job.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=re.escape(f"{key}: Invalid enum value 'typo'; one of {choices}")):
        load_job(tmp_path / "job.toml")


def test_a_wrong_choice_in_python_too() -> None:
    with pytest.raises(ConfigError, match="on_drop: Invalid enum value 'typo'; one of 'requeue', 'discard'"):
        RunConfig(eta=1, batch_size=1, on_drop="typo").checked()  # type: ignore[arg-type]
