"""The run as its events tell it is the run as it is."""

from __future__ import annotations

from roq import RunConfig, Scheduler
from roq.events.fields import EVENTS
from roq.events.follow import read_events
from roq.events.replay import Replay
from tests.protocol.play import Named, expire, trajectory


def replayed(sched: Scheduler) -> Replay:
    replay = Replay()
    for event in read_events(sched):
        replay.apply(event)
    return replay


def check(sched: Scheduler, replay: Replay) -> None:
    """Slots, versions, workers and fates agree with the server's."""
    status = sched.status()
    there = {(slot.buffer, slot.slot): slot.group for slot in sched.slots() if slot.state != "training"}
    assert dict(replay.slots) == there
    for slot in sched.slots():
        group = replay.groups[slot.group]
        assert (group.state, group.ordinal, group.v_traj) == (slot.state, slot.ordinal, slot.v_traj)
        running = {m.worker for m in group.members.values() if m.running}
        assert running == set(slot.workers)
    states = [group.state for group in replay.groups.values()]
    assert states.count("trained") == status.ledger.trained
    assert states.count("filtered") == status.ledger.filtered
    assert (replay.version, replay.training) == (status.version, status.training)
    assert replay.workers == {worker.worker: worker.claims for worker in status.workers}
    assert (replay.paused, replay.ended) == (status.paused, status.ended)


def test_every_event_is_handled() -> None:
    assert Replay.HANDLERS.keys() == set(EVENTS)


def test_a_run_with_everything_in_it(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=2, group_size=2, group_candidates=3))
    run.admit(0, 12)
    check(sched, replayed(sched))
    expire(sched, "w0")
    run.worker = "w1"
    run.claims.clear()
    run.admit(0, 12)
    check(sched, replayed(sched))
    for name in "ABC":
        for claim in run.claims[name][:2]:
            sched.complete(claim, trajectory(claim.v_traj, tokens=5))
    replay = replayed(sched)
    check(sched, replay)
    members = replay.groups[run.group("A")].members
    assert [(m.tokens, m.attempts, m.cancelled) for _, m in sorted(members.items())] == [
        (5, 2, False), (5, 2, False), (0, 2, True),
    ]  # fmt: skip
    assert run.take() == "AB"
    check(sched, replayed(sched))
    run.publish(1)
    sched.filter(run.group("C"), "dirty")
    sched.drop(run.group("D"), "by hand")
    sched.pause()
    sched.leave("w1")
    replay = replayed(sched)
    check(sched, replay)
    gone = {group.group: (group.state, group.reason) for group in replay.groups.values() if group.reason}
    assert gone == {run.group("C"): ("filtered", "dirty"), run.group("D"): ("requeued", "by hand")}
    replay.forget(list(replay.groups.values()))
    assert (replay.groups, replay.slots, replay.prompts) == ({}, {}, {})


def test_post_processing(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=1, post_process="m:f"))
    run.admit(0, 1)
    done = run.complete("A")
    assert done.status == "judging"
    replay = replayed(sched)
    assert replay.groups[1].state == "judging"
    assert replay.groups[1].members[0].worker == "w0"
    assert done.judgement is not None
    sched.judge(done.judgement)
    check(sched, replayed(sched))
