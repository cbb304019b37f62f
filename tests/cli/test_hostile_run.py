"""A run whose workers write what they can into it: no command lets it act on a terminal, or fails on it."""

from __future__ import annotations

import json
import logging
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from textual.widgets import DataTable, RichLog

from roq import RunConfig, Scheduler, Trajectory, cli
from roq.board.feed import RunFeed
from roq.cli import main
from roq.events.event import Event
from roq.observe.report import write_report
from roq.observe.timeline import timeline_of
from roq.observe.watch import Watch
from roq.protocol.keys import keys_of
from roq.text import LineFormatter, printable
from tests.conftest import Server
from tests.waiting import until_async

EVIL = "\x1b]0;owned\x07\rINFO all is well\nINFO forged\x9b31m\x7f\u202egnp.exe\u2028\u2066x"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
RUN = "hostile"
READS = (
    ("status",),
    ("buffers",),
    ("buffers", "--long"),
    ("workers",),
    ("verify",),
    ("events",),
    ("audit",),
    ("dead",),
    ("group", "1"),
    ("group", "2"),
    ("doctor",),
)


@pytest.fixture
def hostile(server: Server) -> Server:
    """A worker and an operator hand in :data:`EVIL` wherever the functions take text; one group is dead."""
    with Scheduler(server.url, RUN) as sched:
        sched.create(RunConfig(eta=1, batch_size=2, total_steps=9, max_attempts=1), weights="w")
        sched.renew("w0", 0, {"tokens_per_s": 1e300, "doing": EVIL, "completed": [EVIL], "swaps": 10**400})
        sched.renew("w1", 0, {EVIL: EVIL})
        first, second, third = sched.reserve("w0", 0, 3).reservations
        sched.complete(first, Trajectory([1], [2], [-0.1], [(0, 1)], 1.0))
        sched.fail(second, EVIL)
        sched.release(third, EVIL)
        sched.pause(EVIL)
    return server


def forge(server: Server, fields: dict[Any, Any], id_: str = "*") -> None:
    """An event by a worker's hand; XADD is among its rights."""
    server.redis.xadd(keys_of(RUN)["events"], fields, id_)


def roq(*arguments: object) -> Result:
    """A command with its output as a terminal would be sent it."""
    return CliRunner().invoke(main, list(map(str, arguments)), color=True)


def check(done: Result) -> str:
    """The output, once it is known to hold nothing that a terminal obeys, and no exception."""
    said = done.stdout + done.stderr
    assert OBEYED.search(said) is None, ascii(said)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert not [line for line in said.split("\n") if line.startswith("INFO")], "a forged line"
    return said


@pytest.mark.parametrize("command", READS, ids="-".join)
def test_no_command_prints_what_a_terminal_obeys(hostile: Server, command: tuple[str, ...]) -> None:
    where = ("--redis", hostile.url, "--run", RUN)
    text = check(roq(*command, *where))
    done = roq(*command, *where, "--json")
    check(done)
    lines = done.stdout.splitlines() if command[0] == "events" else [done.stdout]
    for line in lines:
        json.loads(line)
    if command[0] in ("status", "workers", "events"):
        assert "\\x1b]0;owned\\x07" in text
        assert any(EVIL[:10] in str(value) for value in strings(list(map(json.loads, lines))))


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings(part)]
    if isinstance(value, list):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []


def test_every_command_that_reads_a_run_is_held_to_it() -> None:
    """A new command with a run comes into READS, or here with the reason why it prints none of its text."""
    others = {
        "watch", "board", "metrics", "report",  # held by their own tests
        "pause", "resume", "drop", "filter", "reject", "drain", "export",  # print only what the user gave
    }  # fmt: skip
    aimed = {name for name, command in main.commands.items() if any(p.name == "run" for p in command.params)}
    assert aimed - others - {"acl"} == {command[0] for command in READS}


FORGED: list[dict[Any, Any]] = [
    {"foo": "bar"},
    {"event": "publish", "version": "1", "metrics": "nope"},
    {"event": "publish"},
    {"event": b"\xff\xfe", "group": "1"},
    {b"\xff\xfe": b"\xff", "event": "complete"},
    {"event": "occupy", "group": "x" * 100, "at": "1"},
    {"event": "archive", "run": "x", "config": "junk"},
    {"event": "gap", "missing": "7"},
    {"event": "created", "id": "0-0"},
    {"event": EVIL, EVIL: EVIL},
    {"event": "complete", "group": "-1", "member": "1e5"},
    {"event": "moved_by_a_newer_library", "group": "1"},
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: ascii(next(iter(forged.values())))[:24])
def test_an_event_by_hand_stops_no_observer(hostile: Server, forged: dict[Any, Any], tmp_path: Path) -> None:
    forge(hostile, forged)
    where = ("--redis", hostile.url, "--run", RUN)
    for command in ("status", "events"):
        done = roq(command, *where)
        assert done.exit_code == 0, done.stderr
        check(done)
        assert done.stderr.count("'other'") == 1
    with Scheduler(hostile.url, RUN) as sched:
        audit = sched.audit()
        (entry,) = hostile.redis.xrevrange(keys_of(RUN)["events"], count=1)
        named = any(entry[0].decode() in problem for problem in audit.problems)
        assert named or sum(audit.unknown.values()) == 1, audit
    archive = tmp_path / "events.jsonl"
    kept = roq("events", *where, "--archive", archive)
    assert kept.exit_code == 0, kept.stderr
    assert check(roq("events", *where, "--archive", archive))  # what was written can be read again


def test_a_time_that_no_calendar_has(hostile: Server) -> None:
    forge(hostile, {"event": "ended"}, "9007199254740991-1")
    where = ("--redis", hostile.url, "--run", RUN)
    for command in (("events",), ("status",), ("audit",), ("group", "1")):
        assert check(roq(*command, *where))


async def test_watch_shows_escapes(hostile: Server) -> None:
    with Scheduler(hostile.url, RUN) as sched:
        app = Watch(hostile.url, RUN, sched.config(), every_s=0.1)
        async with app.run_test(size=(160, 40)):
            table, lines = app.query_one("#workers", DataTable), app.query_one("#log", RichLog).lines
            await until_async(lambda: table.row_count == 2)
            sched.resume(EVIL)
            forge(hostile, {"event": "publish", "metrics": "nope"})
            await until_async(lambda: any("other" in line.text for line in lines))
            cells = [str(cell) for row in range(2) for cell in table.get_row_at(row)]
            shown = "".join(cells + [line.text for line in lines])
    assert "\\x1b]0;owned" in shown
    assert OBEYED.search(shown) is None


def test_a_report_shows_escapes(tmp_path: Path) -> None:
    timeline = timeline_of(Event(f"{i}-0", fields) for i, fields in enumerate(REPORTED, 1))
    timeline.run = EVIL
    write_report(timeline, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "\\x1b]0;owned" in page
    assert OBEYED.search(page) is None


ONE = {"group": "1", "ordinal": "0"}
REPORTED = (
    {"event": "created"},
    {"event": "reserve", "worker": EVIL, "at": "0.1", "v_traj": "0", **ONE, "members": "1"},
    {"event": "complete", "group": "1", "member": "1", "worker": EVIL, "tokens": "1", "reward": "1"},
    {"event": "occupy", "group": "1", "ordinal": "0", "at": "0.1", "v_traj": "0"},
    {"event": "take", "version": "0", "trainer": "t", "groups": "1"},
    {"event": "publish", "version": "9007199254740991", "trainer": "t"},
    {"event": "discarded", "group": "1", "ordinal": "0", "from": "0.1", "reason": EVIL},
)  # fmt: skip


async def test_the_board_sends_escapes(hostile: Server) -> None:
    forge(hostile, {"event": EVIL, EVIL: EVIL})
    feed = RunFeed(hostile.url, RUN)
    await feed.start()
    said: dict[str, bytes] = {}
    try:
        async with aclosing(feed.messages(None)) as messages:
            async for message in messages:
                said[message.kind] = message.data
                if "status" in said:
                    break
    finally:
        await feed.stop()
    for kind in ("events", "status"):
        text = "".join(strings(json.loads(said[kind])))
        assert "\\x1b]0;owned" in text
        assert OBEYED.search(text) is None


def test_a_log_record_is_one_line() -> None:
    record = logging.LogRecord("roq", logging.WARNING, "f", 1, "error: %s", (EVIL,), None)
    line = LineFormatter("%(asctime)s %(message)s").format(record)
    assert OBEYED.search(line) is None
    assert "\n" not in line


def test_commands_print_in_one_place() -> None:
    folder = Path(cli.__file__).parent
    found = [
        path.name for path in folder.glob("*.py") if re.search(r"click\.echo\(|\bprint\(", path.read_text())
    ]
    assert sorted(found) == ["common.py", "control.py", "sim.py"]  # the library's text; rich's tables


def test_printable() -> None:
    assert printable("plain, η → ∞ \\n") == "plain, η → ∞ \\n"
    assert OBEYED.search(printable(EVIL)) is None
    assert "\n" not in printable(EVIL)
    assert printable("\ud800\x1b\r\n\t\x7f\x85\u202e") == "\\ud800\\x1b\\r\\n\\t\\u007f\\u0085\\u202e"
    assert json.loads(printable(json.dumps({"a": EVIL}, ensure_ascii=False))) == {"a": EVIL}
