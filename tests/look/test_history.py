"""Events from the stream and from archives are the same, and what is missing is told."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq import AsyncScheduler, ConfigError, RoqError, RunConfig, Scheduler
from roq.audit import audit_archive
from roq.history import (
    BEGINNING,
    Archive,
    Event,
    archived_config,
    follow,
    parse_place,
    read_archive,
    read_events,
)
from tests.protocol.play import Named

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
    return sched._redis.xinfo_stream(sched._operations.keys["events"])["entries-added"]


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
        with pytest.raises(RoqError, match="another process"):
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
    assert audit_archive((event.fields for event in kept), 1).problems == []
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
    problems = audit_archive((event.fields for event in kept), 1).problems
    assert any("were trimmed from the stream" in problem for problem in problems)


def test_files_that_cannot_be(sched: Scheduler, tmp_path: Path) -> None:
    play(sched)
    file = tmp_path / "events.jsonl"
    with Archive(file, "test", CONFIG) as archive:
        archive.append(read_events(sched))
        with pytest.raises(RoqError, match="created anew"):
            archive.append(read_events(sched))
    with pytest.raises(ConfigError, match="not an archive of run other"):
        Archive(file, "other", CONFIG)
    with pytest.raises(ConfigError, match="earlier run"):
        Archive(file, "test", RunConfig(eta=2, batch_size=4))
    with pytest.raises(ConfigError, match="plain text"):
        Archive(tmp_path / "events.jsonl.gz", "test", CONFIG)
    with pytest.raises(ConfigError, match="cannot be written"):
        Archive(tmp_path / "no" / "events.jsonl", "test", CONFIG)
    (tmp_path / "text").write_text('{"id":"1-0","event":"created"}\nhello\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_archive(tmp_path / "text"))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_archive(tmp_path / "none.jsonl"))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(file.read_bytes())[:200])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_archive(tmp_path / "broken.gz"))
