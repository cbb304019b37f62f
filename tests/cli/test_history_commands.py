"""The commands that look back, on the worked example of the protocol."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roq.cli import main
from roq.events.archive import read_archive
from roq.events.follow import read_events
from tests.conftest import environment
from tests.protocol.play import Named
from tests.waiting import until

Roq = Callable[..., Result]


@pytest.fixture
def roq(example: Named) -> Roq:
    """``roq COMMAND …`` on the example's run, in this process."""

    def run(*arguments: object) -> Result:
        where = ["--redis", example.sched.url, "--run", example.sched.run]
        return CliRunner().invoke(main, [*map(str, arguments), *where])

    return run


def good(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def test_events(roq: Roq, example: Named) -> None:
    lines = good(roq("events")).splitlines()
    assert "created" in lines[0]
    assert "occupy          group 1, ordinal 0, at 0.1, v_traj 0, moves 6:0.3>1.4" in "\n".join(lines)
    rows = [json.loads(line) for line in good(roq("events", "--json")).splitlines()]
    assert len(rows) == len(lines) == len(list(read_events(example.sched)))
    later = good(roq("events", "--json", "--from", rows[4]["id"])).splitlines()
    assert [json.loads(line) for line in later] == rows[5:]
    wrong = roq("events", "--from", "yesterday")
    assert (wrong.exit_code, "'yesterday'" in wrong.output) == (2, True)


def test_archive_and_audit(roq: Roq, example: Named, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    count = len(list(read_events(example.sched)))
    assert good(roq("events", "--archive", file)) == f"{file}: {count} events\n"
    example.complete("H")
    assert good(roq("events", "--archive", file)) == f"{file}: {count + 2} events\n"
    assert "every prompt is accounted for once" in good(roq("audit", "--events", file))
    alone = CliRunner().invoke(main, ["audit", "--events", str(file), "--json"])
    assert json.loads(good(alone))["fates"] == {"in_slots": 8, "trained": 4}
    text = file.read_text().replace('"at":"1.3"', '"at":"5.3"', 1)
    file.write_text(text)
    bad = CliRunner().invoke(main, ["audit", "--events", str(file)])
    assert bad.exit_code == 1
    both = roq("events", "--archive", file, "--json")
    assert (both.exit_code, "--from and --json" in both.output) == (2, True)
    assert CliRunner().invoke(main, ["audit"]).exit_code == 2


def test_following_into_an_archive(example: Named, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # not ignored
    code += "from roq.cli import main; main(prog_name='roq')"
    command = [sys.executable, "-c", code, "events", "--follow"]
    command += ["--archive", str(file), "--redis", example.sched.url, "--run", example.sched.run]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    until(lambda: file.exists() and b'"publish"' in file.read_bytes(), "the event publish")
    example.sched.pause()
    until(lambda: b'"paused"' in file.read_bytes(), "the event paused")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=10)
    assert (process.returncode, said) == (0, f"{file}: {len(list(read_archive(file))) - 1} events\n")


def test_a_group_s_history(roq: Roq, example: Named, tmp_path: Path) -> None:
    trained = good(roq("group", example.group("A")))
    assert "group 1: prompt 0, trained in batch 0 with staleness 0" in trained
    happened = [line.split()[2] for line in trained.splitlines() if line.lstrip().startswith("+")]
    assert happened == ["reserve", "complete", "occupy", "take", "publish"]
    assert "1  w0             1  0.0 s       2       1" in trained

    moved = json.loads(good(roq("group", example.group("H"), "--json")))
    assert (moved["state"], moved["place"]) == ("reserved", "1.4")
    assert sum("moves" in event for event in moved["events"]) >= 2

    example.sched.drop(example.group("K"), "by hand")
    example.admit(1, 1)
    dropped = good(roq("group", example.group("K")))
    assert "group 11: prompt 10, requeued (by hand)" in dropped
    assert "the same prompt was group 13, reserved at 2." in dropped
    unknown = roq("group", 999)
    assert (unknown.exit_code, "group 999" in unknown.output) == (2, True)

    file = tmp_path / "events.jsonl"
    good(roq("events", "--archive", file))
    alone = CliRunner().invoke(main, ["group", "1", "--events", str(file)])
    assert good(alone) == good(roq("group", 1))


def test_status_on_one_screen(roq: Roq) -> None:
    text = good(roq("status"))
    assert "run demo: running, step 1 of 9, η = 1, buffers 1 to 2 open" in text
    assert "last step: v1 published, reward 0.500, staleness 0.25 (max 1), 2,048 tokens" in text
    assert "trainer: waiting for batch 1: 2 complete, 2 in progress, 0 empty; oldest: slot 3, with w0" in text
    assert len(text.splitlines()) <= 20
    picture: dict[str, Any] = json.loads(good(roq("status", "--json")))
    assert picture["last_step"]["reward/mean"] == 0.5
    assert (picture["tokens_per_s"], picture["eta"], picture["total_steps"]) == (12, 1, 9)


def test_a_missing_package_is_named(roq: Roq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command, extra in (("watch", "watch"), ("metrics", "metrics"), ("report", "local")):
        refused = roq(command)
        assert refused.exit_code == 2
        assert f"pip install '.[{extra}]'" in refused.output
