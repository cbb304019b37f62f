"""roq sim at the command line: tables, JSON, figures, a plan with its reason, input that cannot work."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roq.cli import main
from roq.sim.experiments import Figures, Spread
from roq.sim.plan import Option, recommend
from roq.sim.scenario import Limits

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
SMALL = ("--batch-size", "4", "--group-size", "2", "--places", "6", "--set", "lengths.groups=64",
         "--set", "lengths.median=600", "--trainer-gpus", "2", "--jobs", "1")  # fmt: skip


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``roq sim …`` in this process; the simulator's own processes find the sources as it does."""
    paths = [str(ROOT), str(ROOT / "workers"), str(ROOT / "trainer")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["sim", *map(str, arguments)])

    return run


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_staleness(sim: Callable[..., Result], tmp_path: Path) -> None:
    done = sim("staleness", "--eta", "0,2", "--batches", 6, "--seeds", 2, *SMALL, "--figure", tmp_path / "s")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1] in "02" and "%" in line]
    assert [row[:4] for row in rows] == [["0", "12", "12", "12"], ["2", "12", "12", "12"]]
    assert "assumed: lognormal: median 600" in done.stdout
    assert "rollout limit" in done.stdout
    assert is_png(tmp_path / "s.png")
    assert ET.parse(tmp_path / "s.svg").getroot().tag.endswith("svg")


def test_staleness_as_json(sim: Callable[..., Result]) -> None:
    done = sim("staleness", "--eta", "1", "--batches", 5, "--seeds", 1, *SMALL, "--json")
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert (row["batches"], row["full"], row["within"]) == (5, 5, 5)
    assert sum(row["trajectories"].values()) == 5 * 8
    assert row["limits"]["rollout"] > row["figures"]["throughput"]["mean"] > 0
    assert row["figures"]["avoidable"] == 0


def test_compare(sim: Callable[..., Result], tmp_path: Path) -> None:
    arguments = ("compare", "--eta", "1", "--batches", 4, "--steady", 8, "--seeds", 2, *SMALL)
    done = sim(*arguments, "--figure", tmp_path / "c")
    assert done.exit_code == 0, done.output
    for label in ("roq", "NeMo-RL in_order", "NeMo-RL weight_fifo", "verl drop", "TRL", "ROLL, evicting"):
        assert f" {label} " in done.stdout
    assert "upper limits: rollout" in done.stdout
    assert "article" not in done.stdout  # its figures are for its own setting
    assert is_png(tmp_path / "c.png")
    found = json.loads(sim(*arguments, "--policy", "roq", "--policy", "trl", "--json").stdout)
    assert [row["policy"] for row in found["rows"]] == ["roq", "trl"]
    ours, theirs = found["rows"]
    assert ours["cold_speedup"] == [1.0, 0.0] or ours["cold_speedup"] == {"mean": 1.0, "deviation": 0.0}
    assert theirs["steady"]["throughput"]["mean"] > 0
    assert (found["batches"], found["steady_to"], found["seeds"]) == (4, 8, 2)


def test_plan(sim: Callable[..., Result], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [f'{{"prompt": 20, "responses": [{200 + 30 * i}, 300, 500]}}\n' for i in range(40)]
    trace.write_text("".join(rows))
    done = sim(
        "plan", "--eta", "1,2", "--concurrency", "6", "--split", "2+2", "--split", "3+1", "--candidates",
        "0,1", "--batches", 12, "--seeds", 1, "--trace", trace, *SMALL[:4], "--jobs", 1, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["options"]) == 2 * 2 * 2
    best = found["options"][found["recommended"]]["figures"]["throughput"]["mean"]
    most = max(option["figures"]["throughput"]["mean"] for option in found["options"])
    assert best >= 0.99 * most
    assert "bottleneck" in found["reason"]
    assert "trace trace.jsonl: 40 groups" in found["assumed"]


def test_a_plan_says_what_cannot_run(sim: Callable[..., Result], tmp_path: Path) -> None:
    """Two responses to a prompt are too few for a third candidate: refused; the others are compared."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": 20, "responses": [300, 500]}\n' * 8)
    done = sim(
        "plan", "--eta", "1", "--concurrency", "4", "--candidates", "0,1", "--batches", 3, "--seeds", 1,
        "--trace", trace, *SMALL[:4], "--jobs", 1,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "cannot run: " in done.stdout
    assert "recommended: η = 1, 4 places" in done.stdout
    assert "because: " in done.stdout


def option(eta: int, places: int, throughput: float, staleness: float, thrown: float = 0.0) -> Option:
    shown = Figures(
        throughput=Spread(throughput, 0.0), aborted=Spread(thrown, 0.0), dropped=Spread(0.0, 0.0),
        trainer_idle=0.6, rollout_idle=0.0, staleness_mean=staleness, staleness_max=eta, avoidable=0.0,
        limit_share=0.9,
    )  # fmt: skip
    return Option(
        eta=eta, places=places, instances=2, trainer_gpus=6, slots=16, candidates=8, figures=shown,
        limits=Limits(rollout=2300, trainer=6300),
    )  # fmt: skip


def test_what_is_recommended() -> None:
    """The freshest of those within 1% of the best; what throws work away only if it is better by more."""
    options = [option(1, 40, 1700, 1.0), option(2, 40, 1995, 1.9), option(3, 40, 2000, 1.5)]
    number, reason = recommend(options)
    assert number == 2
    assert "η = 2 would change the throughput by -0.2%" in reason
    assert "rollout is the bottleneck: the trainer is idle 60%" in reason
    assert recommend([*options, option(3, 40, 2010, 1.0, thrown=300)])[0] == 2
    assert recommend([*options, option(3, 40, 2200, 1.0, thrown=300)])[0] == 3
    assert recommend([*options, option(3, 32, 1999, 1.5)])[0] == 3


def test_calibrate(sim: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "cost.toml"
    done = sim("calibrate", DATA / "gcd-eta1.jsonl.gz", "--name", "two cores", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cost"]["name"] == "two cores"
    again = sim("staleness", "--eta", "1", "--batches", 3, "--seeds", 1, "--cost", out, "--places", 64,
                "--trace", DATA / "gcd-eta1.jsonl.gz", "--jobs", 1)  # fmt: skip
    assert again.exit_code == 0, again.output
    assert "event log gcd-eta1.jsonl.gz" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--policy", "rol"), "did you mean 'roll'"),
        (("compare", "--cost", "nothing.toml"), "nothing.toml"),
        (("compare", "--eta", "0"), "with eta = 0 it can generate nothing"),
        (("staleness", "--set", "rollout.kv_tokens=20000"), "could never finish; raise kv_tokens"),
        (("staleness", "--batch-size", 2000), "a batch of 2000 groups cannot be filled from a trace of 1024"),
        (("staleness", "--batch-size", 0), "batch_size"),
        (("staleness", "--set", "rollout.speed=3"), "'rollout.speed=3'"),
        (("staleness", "--trace", "nothing.jsonl"), "nothing.jsonl cannot be read"),
        (("plan", "--slots", "9000", "--seeds", 1), "no setting can run"),
        (("plan", "--split", "8"), "must look like 2+6"),
        (("calibrate",), "--run NAME"),
        (("calibrate", "nothing.jsonl"), "nothing.jsonl cannot be read"),
    ],
)
def test_input_that_cannot_work(
    arguments: tuple[object, ...], message: str, sim: Callable[..., Result]
) -> None:
    done = sim(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra(sim: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "simpy" else found(name))
    done = sim("compare")
    assert done.exit_code == 2
    assert "the simulator needs simpy: pip install '.[sim]'" in done.stderr


def test_the_command_line_starts_without_the_simulator() -> None:
    """Neither numpy nor simpy is loaded before a simulation is asked for."""
    code = "import sys, roq.cli; print(sorted({'numpy', 'simpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
