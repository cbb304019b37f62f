"""The audit proves a good history and sees each way in which one could be bad."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roq import RunConfig, Scheduler
from roq.events.audit import Audit, audit_events
from roq.events.event import Event
from roq.events.follow import read_events
from roq.protocol.snapshot import Snapshot
from tests.protocol.play import Named, by_hand, expire

Events = list[dict[str, str]]


def history(sched: Scheduler) -> tuple[Events, Snapshot]:
    """A short run with a re-issue, a drop and a filter in it."""
    run = Named(sched, RunConfig(eta=1, batch_size=2))
    run.admit(0, 4)
    expire(sched, "w0")
    run.worker = "w1"
    run.claims.clear()
    run.admit(0, 4)
    for name in "ABC":
        run.complete(name)
    sched.filter(run.group("C"), "dirty")
    sched.drop(run.group("D"), "broken")
    run.admit(0, 1)
    assert run.take() == "AB"
    run.publish(1)
    events = [dict(event.fields) for event in read_events(sched)]
    return events, Snapshot(by_hand(sched, "verify"))


def audited(events: Events, snapshot: Snapshot) -> Audit:
    return audit_events((Event(f"{i}-0", fields) for i, fields in enumerate(events, 1)), 1, snapshot)


def test_a_good_history(sched: Scheduler) -> None:
    events, snapshot = history(sched)
    found = audited(events, snapshot)
    assert found.problems == []
    assert found.fates == {"trained": 2, "filtered": 1, "in_slots": 1}
    assert (found.issued, found.reissued, found.expired) == (4, 4, 4)
    assert found.staleness == {0: 2}
    assert sched.audit() == found


def without(kind: str) -> Callable[[Events], Events]:
    def change(events: Events) -> Events:
        index = next(i for i, event in enumerate(events) if event["event"] == kind)
        return events[:index] + events[index + 1 :]

    return change


def doubled(kind: str) -> Callable[[Events], Events]:
    return lambda events: [event for one in events for event in [one] * (1 + (one["event"] == kind))]


def changed(kind: str, **fields: str) -> Callable[[Events], Events]:
    return lambda events: [{**event, **fields} if event["event"] == kind else event for event in events]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (without("created"), "trimmed"),
        (without("reserve"), "not in the run"),
        (without("occupy"), "not a finished group"),
        (without("filtered"), "1 in Redis"),
        (without("requeued"), "issued again"),
        (without("publish"), "2 in Redis"),
        (without("take"), "not in training"),
        (doubled("take"), "taken twice"),
        (changed("take", version="1"), "before batch 0"),
        (doubled("occupy"), "finished twice"),
        (doubled("publish"), "published after"),
        (doubled("reserve"), "created twice"),
        (changed("occupy", at="1.1"), "slot 1.1, which holds"),
        (changed("occupy", v_traj="-2"), "staleness 2"),
        (changed("take", groups="1 1"), "not a finished group in slot 2"),
        (changed("reissue", at="9.9"), "issued at 9.9"),
    ],
)
def test_bad_histories(sched: Scheduler, change: Callable[[Events], Events], word: str) -> None:
    events, snapshot = history(sched)
    found: list[str] = audited(change(events), snapshot).problems
    assert any(word in problem for problem in found), found
