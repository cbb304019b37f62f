"""Configurations and job files that cannot be are refused by name, wherever they are built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roq import ConfigError, RunConfig, Scheduler, load_job
from roq.config import Reward
from roq.protocol.keys import keys_of
from tests.protocol.play import direct

EXAMPLE = Path(__file__).parents[2] / "examples" / "gcd.toml"


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
    with direct(sched) as client:
        assert not client.exists(keys_of(sched.run)["config"])


@pytest.mark.parametrize("settings", [{"a.b": None}, {"a.b": {"x": 1}}, {"eta": "7"}])
def test_settings_are_text_with_a_dot_in_their_names(sched: Scheduler, settings: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(next(iter(settings))))):
        sched.create(RunConfig(eta=1, batch_size=2), settings=settings)
    with direct(sched) as client:
        assert not client.exists(keys_of(sched.run)["config"])


@pytest.mark.parametrize("name", ["a:b\n", "..:x", "a:", ":b", "a.b", "a:b:c", "1a:b", "a b:c", "a:b.c"])
def test_names_of_functions_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="post_process"):
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
    lines = [line for line in EXAMPLE.read_text().splitlines() if not line.startswith(f"{name} ")]
    lines.insert(lines.index(f"[{section}]") + 1, f'{name} = "typo"')
    (tmp_path / "job.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}.*typo.*{choices}"):
        load_job(tmp_path / "job.toml")


def test_a_wrong_choice_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"on_drop.*typo.*'requeue', 'discard'"):
        RunConfig(eta=1, batch_size=1, on_drop="typo").checked()  # type: ignore[arg-type]


JOB = """
[run]
name = "demo"
dir = "run"
[protocol]
eta = 1
batch_size = 2
[model]
path = "model"
[data]
file = "p.jsonl"
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"run"', '"r\\u0000n"'),
        ('"run"', '""'),
        ('"run"', '"~nobody-of-this-name/run"'),
        ('"model"', '"./mo\\u0000del"'),
        ('"model"', '"mo\\u0000del"'),
        ('"model"', '"~nobody-of-this-name"'),
        ('"p.jsonl"', '"p\\u0000.jsonl"'),
        ('"demo"', '"de mo"'),
        ('"demo"', '"{demo}"'),
        ('"demo"', '"d\\u0000"'),
        ('"demo"', '"' + "d" * 65 + '"'),
        ('"demo"', '"é"'),
        ("eta = 1", "eta = " + "[" * 5000 + "]" * 5000),
        ("eta = 1", "eta = 1\0"),
    ],
)
def test_job_files_that_cannot_be(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    load_job(file)
    file.write_text(JOB.replace(old, new))
    with pytest.raises(ConfigError):
        load_job(file)


def test_a_job_file_that_is_no_path() -> None:
    with pytest.raises(ConfigError, match=r"^a.b:"):
        load_job("a\0b")
