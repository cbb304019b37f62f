"""Events from the stream and from archives are the same, and what is missing is told."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from roq import AsyncScheduler, ConfigError, RoqError, RunConfig, Scheduler
from roq.cli import main
from roq.events.archive import LONGEST, Archive, archived_config, read_archive
from roq.events.audit import audit_events
from roq.events.event import BEGINNING, Event, parse_place
from roq.events.follow import follow, read_events
from roq.protocol.keys import keys_of
from tests.conftest import Server
from tests.protocol.play import Named, direct

CONFIG = RunConfig(eta=1, batch_size=4)


def play(sched: Scheduler, config: RunConfig = CONFIG) -> Named:
    """The first five steps of the worked example."""
    run = Named(sched, config)
    run.admit(0, 6)
    for name in "ADCE":
        run.complete(name)
        run.admit(0, 1)
    run.take()
    return run


def churn(sched: Scheduler, count: int) -> None:
    """``count`` more events."""
    for i in range(count // 2):
        sched.renew(f"w{i}", 0)
        sched.leave(f"w{i}")


def added(sched: Scheduler) -> int:
    """Events that the run has ever had."""
    with direct(sched) as client:
        return client.xinfo_stream(keys_of(sched.run)["events"])["entries-added"]


def test_events_are_typed(sched: Scheduler) -> None:
    play(sched)
    events = list(read_events(sched))
    assert [event.name for event in events[:4]] == ["created", "worker_joined", "reserve", "reserve"]
    occupied = next(event for event in events if event.name == "occupy")
    assert occupied.number("group") == 1
    assert occupied.get("nothing", "?") == "?"
    assert [(m.group, str(m.source), str(m.target)) for m in occupied.moves] == [(6, "0.3", "1.4")]
    assert parse_place(occupied.get("at")) == (0, 1)
    assert all(a.time <= b.time for a, b in itertools.pairwise(events))
    assert Event.parse(occupied.line()) == occupied


async def test_both_clients_read_the_same_in_pages(sched: Scheduler) -> None:
    play(sched)
    churn(sched, 2000)
    events = list(read_events(sched))
    assert len(events) > 2000
    assert len({event.id for event in events}) == len(events)
    async with AsyncScheduler(sched.url, sched.run) as other:
        page = await other.events(events[9].id)
        assert page == events[10:1010]
        assert await other.events(events[-1].id, wait_s=0.05) == []


def test_following_sees_what_comes(sched: Scheduler) -> None:
    run = play(sched)
    pages: Iterator[list[Event]] = follow(sched)
    assert next(pages)[-1].name == "take"
    run.publish(1)
    (event,) = next(pages)
    assert (event.name, event.number("version")) == ("publish", 1)
    asked = 0

    def going() -> bool:
        nonlocal asked
        asked += 1
        return asked < 2

    assert list(follow(sched, event.id, going=going)) == []


def test_a_trimmed_stream_is_told(sched: Scheduler) -> None:
    play(sched, RunConfig(eta=1, batch_size=4, event_log=100))
    before = list(read_events(sched))
    churn(sched, 1000)
    events = list(read_events(sched))
    assert events[0].name == "gap"
    assert sum(event.count for event in events) == added(sched)
    # after an event that is trimmed itself, with and without knowing how many there had been
    (known,) = [e for e in sched.events(before[4].id, known=5) if e.name == "gap"]
    assert known.number("missing") == events[0].number("missing") - 5
    assert sched.events(before[4].id)[0].fields == {"event": "gap"}
    # and nothing is told where nothing is missing
    assert all(event.name != "gap" for event in sched.events(events[1].id))


def test_an_archive_goes_on_where_it_ends(sched: Scheduler, tmp_path: Path) -> None:
    run = play(sched)
    file = tmp_path / "events.jsonl"
    with Archive(file, "test", CONFIG) as archive:
        archive.append(read_events(sched))
        with pytest.raises(RoqError, match=str(file)):
            Archive(file, "test", CONFIG)
    run.publish(1)
    with file.open("ab") as torn:
        torn.write(b'{"id":"99-0","eve')
    assert [event.name for event in read_archive(file)][-1] == "take"
    with Archive(file, "test", CONFIG) as archive:
        for page in follow(sched, archive.last, known=archive.known, going=lambda: False):
            archive.append(page)
        assert archive.known == len(list(read_events(sched)))
    kept = list(read_archive(file))
    assert kept[0].name == "archive"
    assert archived_config(kept) == CONFIG
    assert kept[1:] == list(read_events(sched))
    packed = tmp_path / "events.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert list(read_archive(packed)) == kept
    assert audit_events(kept, 1).problems == []
    found = sched.audit(read_archive(file))
    assert found == sched.audit()
    assert found.fates["trained"] == 4


def test_an_archive_notes_a_gap(sched: Scheduler, tmp_path: Path) -> None:
    config = RunConfig(eta=1, batch_size=4, event_log=100)
    play(sched, config)
    file = tmp_path / "events.jsonl"
    with Archive(file, "test", config) as archive:
        archive.append(sched.events(BEGINNING, known=0))
    churn(sched, 1000)
    for _ in range(2):
        with Archive(file, "test", config) as archive:
            for page in follow(sched, archive.last, known=archive.known, going=lambda: False):
                archive.append(page)
            assert archive.missing > 0
            assert archive.known == added(sched)
    kept = list(read_archive(file))
    assert [event.name for event in kept].count("gap") == 1
    problems = audit_events(kept, 1).problems
    assert any("were trimmed from the stream" in problem for problem in problems)


def test_files_that_cannot_be(sched: Scheduler, tmp_path: Path) -> None:
    play(sched)
    file = tmp_path / "events.jsonl"
    with Archive(file, "test", CONFIG) as archive:
        archive.append(read_events(sched))
        with pytest.raises(RoqError, match=str(file)):
            archive.append(read_events(sched))
    with pytest.raises(ConfigError, match="run other"):
        Archive(file, "other", CONFIG)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        Archive(file, "test", RunConfig(eta=2, batch_size=4))
    with pytest.raises(ConfigError, match=r"events\.jsonl\.gz"):
        Archive(tmp_path / "events.jsonl.gz", "test", CONFIG)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "no" / "events.jsonl"))):
        Archive(tmp_path / "no" / "events.jsonl", "test", CONFIG)
    (tmp_path / "text").write_text('{"id":"1-0","event":"created"}\nhello\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_archive(tmp_path / "text"))
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        list(read_archive(tmp_path / "none.jsonl"))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(file.read_bytes())[:200])
    with pytest.raises(ConfigError, match=r"broken\.gz"):
        list(read_archive(tmp_path / "broken.gz"))


LINES = (
    {"id": "0-0", "event": "archive", "run": "r", "config": '{"eta":1,"batch_size":1}'},
    {"id": "1-0", "event": "created"},
    {"id": "2-0", "event": "reserve", "group": "1", "ordinal": "0", "members": "1", "at": "0.1",
     "v_traj": "0", "worker": "w"},
    {"id": "3-0", "event": "complete", "group": "1", "member": "1", "worker": "w", "tokens": "5",
     "reward": "-1.5e-3"},
    {"id": "4-0", "event": "occupy", "group": "1", "ordinal": "0", "at": "0.1", "v_traj": "0"},
    {"id": "5-0", "event": "take", "version": "0", "groups": "1", "trainer": "t"},
    {"id": "6-0", "event": "publish", "version": "1", "trainer": "t", "metrics": '{"loss":1.5}'},
    {"id": "6-1", "event": "hyperspace", "at": "nowhere", "version": "new"},
)  # fmt: skip
BAD = [
    (2, {"id": "abc"}, "invalid event id"),
    (2, {"id": "9" * 30 + "-0"}, "invalid event id"),
    (3, {"id": "2-0"}, "not greater"),
    (4, {"id": "1-5"}, "not greater"),
    (2, {"at": "x.y"}, "a place"),
    (2, {"at": "3"}, "a place"),
    (2, {"group": "zz"}, "a whole number"),
    (2, {"group": "9" * 5000}, "a whole number"),
    (2, {"group": "\u0663"}, "a whole number"),
    (2, {"group": None}, "has no 'group'"),
    (2, {"members": "a,b"}, "a list"),
    (4, {"moves": "1:2"}, "a list"),
    (4, {"v_traj": "-1"}, "a whole number"),
    (5, {"groups": "x y"}, "a list"),
    (5, {"version": None}, "has no 'version'"),
    (6, {"metrics": "{bad"}, "finite numbers"),
    (6, {"metrics": '{"a":"b"}'}, "finite numbers"),
    (6, {"metrics": "[" * 100_000}, "finite numbers"),
    (6, {"version": "-5"}, "a whole number"),
    (3, {"tokens": "nan"}, "a whole number"),
    (3, {"reward": "abc"}, "a finite number"),
    (3, {"reward": "nan"}, "a finite number"),
    (3, {"reward": "1e999"}, "a finite number"),
    (3, {"event": "gap", "missing": "-10"}, "a whole number"),
    (7, {"group": "zz"}, "a whole number"),
    (0, {"config": "{}"}, "invalid configuration"),
    (0, {"config": "[" * 100_000}, "invalid configuration"),
]


@pytest.mark.parametrize(("at", "change", "said"), BAD)
def test_values_that_no_event_has(at: int, change: dict[str, str | None], said: str, tmp_path: Path) -> None:
    """Every reader of an archive refuses it with the file, the line and what is wrong there."""
    lines = [{**line, **(change if i == at else {})} for i, line in enumerate(LINES)]
    text = [json.dumps({k: v for k, v in line.items() if v is not None}) + "\n" for line in lines]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(text))
    for command in (("audit",), ("report", "--out", str(tmp_path / "r.html")), ("group", "1")):
        done = CliRunner().invoke(main, [*command, "--events", str(file)])
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert f"{file}, line {at + 1}: " in done.stderr
        assert said in done.stderr


def test_what_an_archive_may_hold(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert [event.name for event in read_archive(file)] == [line["event"] for line in LINES]
    for command in (("audit",), ("report", "--out", str(tmp_path / "r.html")), ("group", "1")):
        done = CliRunner().invoke(main, [*command, "--events", str(file)])
        assert done.exit_code == 0, done.output


def test_two_groups_in_one_slot_are_a_problem_of_the_audit() -> None:
    lines = [*LINES[:3], {**LINES[2], "group": "2", "ordinal": "1"}]
    ends = [{"event": "discarded", "group": group, "ordinal": "0"} for group in "21"]
    events = (Event(f"{i}-0", fields) for i, fields in enumerate([*lines, *ends], 1))
    problems = audit_events(events, 1).problems
    assert any("group 2" in problem and "slot 0.1" in problem for problem in problems)


@pytest.mark.parametrize("data", [b"[" * 100_000 + b"\n", bytes(1000) + b"\n", bytes(LONGEST + 1)])
def test_lines_that_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match="line 1"):
        list(read_archive(tmp_path / "events.jsonl"))
    packed = bytearray(gzip.compress(os.urandom(1000)))
    packed[12] ^= 0xFF
    (tmp_path / "events.jsonl.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"events\.jsonl\.gz"):
        list(read_archive(tmp_path / "events.jsonl.gz"))


@pytest.mark.parametrize("after", ["9" * 6000, "5-99999999999999999999999", "\u0663", "1-", "-1", "5-5-5"])
def test_from_an_absurd_id(after: str, sched: Scheduler, server: Server) -> None:
    sched.create(CONFIG)
    done = CliRunner().invoke(main, ["events", "--redis", server.url, "--run", "test", "--from", after])
    assert (done.exit_code, repr(after[:60]) in done.stderr) == (2, True), done.output


def test_a_full_disk(sched: Scheduler, server: Server, tmp_path: Path) -> None:
    """The error names the file and the cause; when there is room again, the archive goes on."""
    play(sched)
    file = tmp_path / "events.jsonl"
    start = (sys.executable, "-c", "from roq.cli import main; main()")
    command = [*start, "events", "--redis", server.url, "--run", "test", "--archive", str(file)]

    def limit() -> None:  # Python ignores SIGXFSZ: a write beyond it fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    full = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=60)
    assert (full.returncode, "Traceback" in full.stderr) == (2, False), full.stderr
    assert f"{file} cannot be written: File too large" in full.stderr
    assert file.stat().st_size == 1000
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert list(read_archive(file))[1:] == list(read_events(sched))
    with pytest.raises(ConfigError, match="/dev/full"):
        Archive("/dev/full", "test", CONFIG)
