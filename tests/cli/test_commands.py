"""The commands that look at and steer a run, against a real server and a scripted run."""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner

from roq import RunConfig, Scheduler, Trajectory
from roq.cli import main
from roq.protocol.keys import keys_of
from roq.run.embedded_server import EmbeddedServer
from tests.protocol.play import direct

Roq = Callable[..., Any]


@pytest.fixture
def run(url: str) -> tuple[str, str]:
    """Buffer 0 READY, one group of buffer 1 in work with w0, as ``--redis URL --run demo``."""
    with Scheduler(url, "demo") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, prompts=50, total_steps=9), weights="w")
        sched.renew("w0", 0, {"tokens_per_s": 12})
        claims = sched.reserve("w0", 0, 4).reservations
        for claim in claims[:3]:
            sched.complete(claim, Trajectory([1], [2], [-0.1], [(0, 1)], 1.0))
    return url, "demo"


def read(done: Any) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names_of(command: click.Command) -> set[str | None]:
    return {parameter.name for parameter in command.params}


def test_status(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    picture = read(roq("status", "--redis", url, "--run", name, "--json"))
    assert picture["ledger"]["issued"] == 4
    assert picture["buffers"][0]["state"] == "READY"
    text = roq("status", "--redis", url, "--run", name).stdout
    assert "run demo: running, step 0 of 9, η = 1, buffers 0 to 1 open" in text
    assert "workers: 1 live, generating 12 tokens/s" in text
    assert "batch 0 is READY; no trainer has joined yet" in text
    assert "4 issued = 0 trained + 4 in slots" in text
    assert "w0" in text


def test_buffers(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    assert read(roq("buffers", "--redis", url, "--run", name, "--json"))[0]["occupied"] == 2
    second = read(roq("buffers", "--redis", url, "--run", name, "--json"))[1]["slots"]
    assert [(slot["slot"], slot["state"], slot["workers"]) for slot in second] == [
        (1, "occupied", []),
        (2, "reserved", ["w0"]),
    ]
    text = roq("buffers", "--redis", url, "--run", name).stdout
    assert "buffer 0  READY  2 occupied, 0 reserved, 0 empty  ■■" in text
    assert "buffer 1  FULL  1 occupied, 1 reserved, 0 empty  ■▨" in text
    assert f"1 ■ {second[0]['group']}   2 ▨ {second[1]['group']}" in text
    long = roq("buffers", "--redis", url, "--run", name, "--long").stdout.splitlines()
    assert len(long) == 5
    assert long[-1].split()[:2] == ["reserved", "1.2"]
    assert long[-1].split()[-1] == "w0"


def test_what_the_trainer_waits_for(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    with Scheduler(url, name) as sched:
        assert sched.take("t0") is not None
        sched.publish(1, "w1", "t0")
        assert sched.take("t0") is None
    text = roq("status", "--redis", url, "--run", name).stdout
    assert "trainer: waiting for batch 1: 1 complete, 1 in progress, 0 empty; oldest: slot 2, with w0" in text
    assert "unfinished slots of buffer 1:" in text


def test_workers(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    (worker,) = read(roq("workers", "--redis", url, "--run", name, "--json"))
    assert worker["worker"] == "w0"
    assert worker["info"] == {"tokens_per_s": 12}
    assert 0 <= worker["heartbeat_s"] < 30
    header, row = roq("workers", "--redis", url, "--run", name).stdout.splitlines()
    assert header.split()[:5] == ["worker", "version", "in", "flight", "tokens/s"]
    assert row.split()[:4] == ["w0", "0", "1", "12"]


def test_a_worker_that_says_nothing_of_itself(url: str, roq: Roq) -> None:
    """One's own client may renew without a version and without info."""
    with Scheduler(url, "own") as sched:
        sched.create(RunConfig(eta=1, batch_size=2))
        sched.renew("mine")
    row = ["mine", "-", "0", "-", "-"]
    for command in ("status", "workers", "doctor"):
        text = roq(command, "--redis", url, "--run", "own").stdout
        assert "?" not in text, text
        assert "unknown" not in text, text
        rows = [line.split()[:5] for line in text.splitlines() if line.startswith("mine")]
        assert rows == ([] if command == "doctor" else [row])
    assert "✓ workers      1 alive\n" in text


def test_verify(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    assert read(roq("verify", "--redis", url, "--run", name, "--json")) == {"ok": True, "problems": []}
    with redis.Redis.from_url(url) as c:
        slots = f"roq:{{{name}}}:slots"
        field = next(iter(c.hgetall(slots)))
        c.hdel(slots, field)
    done = roq("verify", "--redis", url, "--run", name)
    assert done.returncode == 1
    assert done.stdout.strip()


def test_pause_and_resume(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    assert "paused" in roq("pause", "--redis", url, "--run", name).stdout
    with Scheduler(url, name) as sched:
        assert sched.status().paused
        assert read(roq("resume", "--redis", url, "--run", name, "--json")) == {"run": name, "paused": False}
        assert not sched.status().paused


def test_drop(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    with Scheduler(url, name) as sched:
        sched.take("t0")
        sched.publish(1, "w1", "t0")
        sched.take("t0")
        group = sched.status().waiting[0].group
    assert (
        read(roq("drop", "--redis", url, "--run", name, "--group", group, "--json"))["status"] == "requeued"
    )
    done = roq("drop", "--redis", url, "--run", name, "--group", 999)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_library_can_be_loaded(url: str, roq: Roq) -> None:
    source = roq("library").stdout
    with redis.Redis.from_url(url) as c:
        assert c.function_load(source, replace=True) == b"roq"


def test_finding_the_run(run: tuple[str, str], roq: Roq, job: Callable[..., Path], folder: Path) -> None:
    url, name = run
    assert roq("verify", ROQ_REDIS=url, ROQ_RUN=name).returncode == 0
    assert roq("verify", job(redis__url=url)).returncode == 0
    assert roq("verify", job(redis__url=url), ROQ_REDIS="redis://127.0.0.1:1", ROQ_RUN="x").returncode == 0
    other = roq("verify", job(redis__url=url), "--run", "other")
    assert other.returncode == 2
    assert len(other.stderr.splitlines()) == 1
    assert "--run NAME" in roq("verify").stderr
    stopped = roq("verify", job(run__dir="elsewhere"))
    assert (stopped.returncode, "elsewhere" in stopped.stderr) == (2, True)


def test_init_twice(job: Callable[..., Path], url: str, roq: Roq) -> None:
    file = job(redis__url=url)
    first = read(roq("init", file, "--json"))
    assert first == {"run": "demo", "created": True, "prompts": 8, "warnings": []}
    assert not read(roq("init", file, "--json"))["created"]
    assert "already exists" in roq("init", file).stdout


def test_init_places_weights_that_the_job_does_not_place(
    url: str, job: Callable[..., Path], roq: Roq, tmp_path: Path
) -> None:
    for name, own, expected in (("a", None, "there/a"), ("b", "mine", "mine")):
        changes = {} if own is None else {"run__weights": str(tmp_path / own)}
        file = job(redis__url=url, run__name=name, **changes)
        for _ in range(2):  # again changes nothing
            read(roq("init", file, "--weights", tmp_path / "there" / "a", "--json"))
        with Scheduler(url, name) as sched:
            assert json.loads(sched.settings()["run.weights"]) == str(tmp_path / expected)


def test_a_server_that_is_away_is_waited_for(folder: Path, roq: Roq) -> None:
    server = EmbeddedServer(folder / "server")
    away = roq("verify", "--redis", server.url, "--run", "demo", "--wait", "0.3")
    assert away.returncode == 1
    assert "waiting for the server at" in away.stderr
    assert "Traceback" not in away.stderr
    server.start()
    with Scheduler(server.url, "demo") as sched:
        sched.create(RunConfig(eta=0, batch_size=1))
    server.stop()
    timer = threading.Timer(3.0, server.start)  # a command takes a second to start on a busy machine
    timer.start()
    back = roq("verify", "--redis", server.url, "--run", "demo")
    timer.join()
    assert back.returncode == 0
    assert "waiting for the server at" in back.stderr
    assert back.stdout == "all invariants hold\n"


def test_no_line_of_a_groups_help_is_truncated() -> None:
    groups = [(), *((name,) for name, one in main.commands.items() if isinstance(one, click.Group))]
    assert len(groups) > 1
    for group in groups:
        text = CliRunner().invoke(main, [*group, "--help"], terminal_width=80).output
        assert "..." not in text.replace("[ARGS]...", ""), text


def test_every_command_has_help() -> None:
    runner = CliRunner()
    text = runner.invoke(main, ["--help"]).output
    for command in main.commands:
        assert f"  {command} " in text
        assert runner.invoke(main, [command, "--help"]).exit_code == 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    """``roq library | head -1`` ends quietly."""
    command = f'{shlex.quote(sys.executable)} -c "from roq.cli import main; main()" library | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "#!lua name=roq\n"
    assert done.stderr == ""


def test_filter(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    with Scheduler(url, name) as sched, direct(sched) as client:
        group = int(next(iter(client.zrange(keys_of(name)["occupied"], 0, 0))))
    text = roq("filter", "--redis", url, "--run", name, "--group", group, "--reason", "dirty").stdout
    assert text == f"group {group} is filtered\n"
    again = roq("filter", "--redis", url, "--run", name, "--group", group)
    assert again.returncode == 1
    assert "left the run" in again.stderr


def test_reject(run: tuple[str, str], roq: Roq) -> None:
    """From the batch in training."""
    url, name = run
    with Scheduler(url, name) as sched:
        batch = sched.take("t0")
        assert batch is not None
        group = batch.groups[0].group
    text = roq("reject", "--redis", url, "--run", name, "--group", group, "--reason", "junk").stdout
    assert text == f"group {group} rejected; its prompt is requeued\n"
    again = roq("reject", "--redis", url, "--run", name, "--group", group)
    assert again.returncode == 1
    assert "left the run" in again.stderr


def test_drain(run: tuple[str, str], roq: Roq) -> None:
    url, name = run
    text = roq("drain", "--redis", url, "--run", name, "--worker", "w0").stdout
    assert "worker w0 leaves when its" in text
    (worker,) = read(roq("workers", "--redis", url, "--run", name, "--json"))
    assert worker["draining"]
    unknown = roq("drain", "--redis", url, "--run", name, "--worker", "w9")
    assert unknown.returncode == 2
    assert unknown.stderr == "roq: no worker w9 is attached; `roq workers` lists them\n"


def test_dead_letters(url: str, roq: Roq) -> None:
    with Scheduler(url, "sick") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, max_attempts=1))
        assert "no dead letters" in roq("dead", "--redis", url, "--run", "sick").stdout
        for claim in sched.reserve("w0", 0, 3).reservations:
            sched.fail(claim, "the tool is broken")
    listed = read(roq("dead", "--redis", url, "--run", "sick", "--json"))
    assert [letter["ordinal"] for letter in listed["dead"]] == [0, 1, 2]
    text = roq("dead", "--redis", url, "--run", "sick").stdout
    assert text.count("the tool is broken") == 3
    assert "UTC" in text
    unknown = roq("dead", "--redis", url, "--run", "sick", "--revive", 0, "--revive", 9)
    assert unknown.returncode == 2
    assert "not dead letters: 9;" in unknown.stderr
    some = roq("dead", "--redis", url, "--run", "sick", "--revive", 1)
    assert "revived prompts: 1;" in some.stdout
    assert read(roq("dead", "--redis", url, "--run", "sick", "--revive-all", "--json"))["revived"] == [0, 2]
    with Scheduler(url, "sick") as sched:
        assert sched.dead() == []
        assert sched.verify() == []


def test_an_archive_is_enough_whatever_the_environment(
    run: tuple[str, str], roq: Roq, tmp_path: Path
) -> None:
    url, name = run
    archive = tmp_path / "events.jsonl"
    assert roq("events", "--redis", url, "--run", name, "--archive", archive).returncode == 0
    done = roq("audit", "--events", archive, ROQ_REDIS="redis://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "4 prompts issued" in done.stdout


TAKE_A_RUN = {name for name, command in main.commands.items() if {"url", "run"} <= names_of(command)}
FURTHER = {
    "group": ["1"],
    "drop": ["--group", "1"],
    "filter": ["--group", "1"],
    "reject": ["--group", "1"],
    "drain": ["--worker", "w0"],
    "export": ["--out", "run.roq"],
    "board": ["--port", "0"],
    "metrics": ["--port", "0"],
    "dead": ["--revive", "1"],
}
"""What else a command must be told."""


@pytest.mark.parametrize("command", sorted(TAKE_A_RUN))
def test_exit_codes_when_the_run_is_not_to_be_found(
    command: str, url: str, job: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 2 where the caller must write something else, 1 where the same command may work later."""
    monkeypatch.chdir(folder)
    away, short = f"unix://{folder}/none.sock", [] if command == "doctor" else ["--wait", "0.1"]
    job()
    cases = {
        "no such file": (["nope.toml"], 2, "nope.toml: cannot be read"),
        "nothing named": ([], 2, "--redis"),
        "a run that was not started": (["job.toml"], 2, "job.toml"),
        "no such run": (["--redis", url, "--run", "nope"], 2, "nope"),
        "no URL": (["--redis", "nonsense", "--run", "demo"], 2, "nonsense"),
        "server away": (["--redis", away, "--run", "demo", *short], 1, "no server at"),
    }
    if command == "doctor":  # it reports what it finds, and that a run is to be created is no fault
        for case in ("a run that was not started", "no such run", "no URL"):
            del cases[case]
    for case, (arguments, code, said) in cases.items():
        done = CliRunner().invoke(main, [command, *FURTHER.get(command, []), *arguments])
        assert done.exit_code == code, (case, done.output)
        assert said in (done.stderr or done.stdout), case
        assert command == "doctor" or done.stdout == "", case
        assert len([line for line in done.stderr.splitlines() if "waiting for" not in line]) <= 1, case
