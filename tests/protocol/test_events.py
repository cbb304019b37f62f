"""Events are declared once, in lua/lib/events.lua; written and documented events match it."""

from __future__ import annotations

import re
from pathlib import Path

from roq import RunConfig, Scheduler
from roq.protocol.events import EVENTS
from tests.protocol.play import Named, events_of

ROOT = Path(__file__).parents[2]
LUA = ROOT / "lua"


def test_every_declared_event_is_written_and_no_other() -> None:
    """Names that are chosen at run time: of ``reserve``, and what becomes of a group that is taken out."""
    text = "\n".join(path.read_text() for path in LUA.rglob("*.lua"))
    written = set(re.findall(r'events\.log\(\s*run,\s*"(\w+)"', text)) | {"created"}
    chosen = {"reserve", "issue", "reissue", "requeued", "discarded", "filtered", "dead"}
    for name in chosen:
        assert f'"{name}"' in text
    assert written | chosen == EVENTS.keys()


def test_headers_name_their_events() -> None:
    for path in (LUA / "functions").glob("*.lua"):
        header, _, body = path.read_text().partition("]]")
        listed = re.search(r"^Events: (.*)", header, re.MULTILINE | re.DOTALL)
        for name in re.findall(r'events\.log\(\s*run,\s*"(\w+)"', body):
            assert listed, path
            assert re.search(rf"\b{name}\b", listed[1]), f"{path.stem}: {name}"


def test_kinds_are_known() -> None:
    text = (LUA / "lib/events.lua").read_text()
    kinds = re.search(r"local kinds = \{(.*?)\n\}", text, re.DOTALL)
    assert kinds
    used = {field.kind for fields in EVENTS.values() for field in fields.values()}
    assert used == set(re.findall(r"^  (\w+) =", kinds[1], re.MULTILINE))


def test_the_table_in_the_docs() -> None:
    page = (ROOT / "docs/observing.md").read_text().partition("| event | fields |")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| \S.* \|$", page, re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", columns) for name, columns in rows}
    assert documented == {name: list(fields) for name, fields in EVENTS.items()}


def test_what_is_written_is_what_is_declared(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=2))
    run.admit(0, 4)
    run.complete("A")
    sched.drop(run.group("B"), "test")
    run.complete("C")
    run.take()
    run.publish(1)
    for _, entry in events_of(sched):
        fields = EVENTS[entry.pop("event")]
        assert list(entry) == [name for name in fields if name in entry], "in the declared order"
        assert {name for name, field in fields.items() if not field.optional} <= entry.keys()
