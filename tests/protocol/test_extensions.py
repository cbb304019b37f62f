"""Partial rollout, filter, drop, groups, over-sampling: the article's sections 7.1 to 7.6."""

from __future__ import annotations

import time

import pytest

from roq import Fenced, NotReady, RunConfig, Scheduler
from tests.protocol.play import Named, by_hand, events_of, expire, trajectory


def test_partial_rollout_counts_by_its_oldest_version(sched: Scheduler) -> None:
    """7.1: begun with v0 and finished with v1, A counts as v0 when it is placed and trained."""
    run = Named(sched, RunConfig(eta=1, batch_size=1))
    assert run.admit(0, 2) == "A 1.1, B 0.1"
    run.complete("B")
    run.take()
    run.publish(1)
    (claim,) = run.claims["A"]
    done = sched.complete(claim, trajectory(0, newest=1, tokens=4))
    assert (done.status, done.buffer) == ("occupied", 1)
    batch = sched.take("t0")
    assert batch is not None
    assert [(g.v_traj, g.staleness) for g in batch.groups] == [(0, 1)]
    assert sched.trajectories(batch.groups)[0][0].segments == [(0, 3), (1, 1)]
    run.verify()


def test_stuck_timeout(sched: Scheduler) -> None:
    """7.2: B and C run out of time in the nearest buffer, D moves forward, G and H are admitted."""
    run = Named(sched, RunConfig(eta=1, batch_size=3, on_drop="discard", stuck_timeout_s=0.05))
    assert run.admit(0, 6) == "A 1.3, B 1.2, C 1.1, D 0.3, E 0.2, F 0.1"
    for name in "AFE":
        run.complete(name)
    assert run.take() == "AFE"
    assert run.picture() == ["R:C R:B R:D"]
    run.publish(1)
    assert run.admit(1, 3) == "G 2.3, H 2.2, I 2.1"
    run.complete("G")
    assert run.picture() == ["R:C R:B R:D", "O:G R:H R:I"]
    assert run.take() is None  # the clock starts
    time.sleep(0.1)
    run.take()
    assert {c.reason for c in sched.renew("w0").cancelled} == {"stuck_timeout"}
    assert run.picture() == ["O:G . .", ". R:H R:I"]
    assert run.admit(1, 3) == "J 2.1, K 1.3, L 1.2"


def test_filter_pulls_a_later_group_forward(sched: Scheduler) -> None:
    """7.3: C is filtered from buffer 0, D moves there from buffer 1, G is admitted."""
    run = Named(sched, RunConfig(eta=1, batch_size=3))
    run.admit(0, 6)
    for name in "ABCD":
        run.complete(name)
    assert run.picture() == ["O:A O:B O:C", "O:D R:E R:F"]
    assert sched.filter(run.group("C"), "no gradient").status == "filtered"
    run.verify()
    assert run.picture() == ["O:A O:B O:D", ". R:E R:F"]
    assert run.admit(0, 1) == "G 1.1"
    assert sched.status().ledger.filtered == 1


def test_filter_fills_its_own_buffer_first(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=3))
    run.admit(0, 6)
    for name in "ABCDE":
        run.complete(name)
    sched.filter(run.group("A"), "dirty")
    run.verify()
    assert run.picture() == ["O:C O:B O:E", "O:D . R:F"]


def test_drop_pulls_occupied_groups_forward(sched: Scheduler) -> None:
    """7.2: B and C of the nearest buffer are dropped, D moves forward, G and H are admitted."""
    run = Named(sched, RunConfig(eta=1, batch_size=3, on_drop="discard"))
    run.admit(0, 3)
    for name in "ABC":
        run.complete(name)
    run.take()
    run.publish(1)
    run.admit(0, 2)  # D, E of version 0: they can only be in buffer 1
    run.admit(1, 3)
    assert run.picture() == [". R:E R:D", "R:H R:G R:F"]
    run.complete("F")
    assert run.picture() == ["O:F R:E R:D", ". R:G R:H"]
    run.complete("G")
    run.complete("H")
    assert run.picture() == ["O:F R:E R:D", "O:G O:H ."]
    for name in "DE":
        assert sched.drop(run.group(name), "too slow").status == "discarded"
        run.verify()
    assert run.picture() == ["O:F O:H O:G", ". . ."]
    assert run.take() == "FHG"
    assert sched.status().ledger.discarded == 2


def test_drop_closes_the_hole(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=0, batch_size=4))
    run.admit(0, 3)
    sched.drop(run.group("A"), "broken")
    run.verify()
    assert run.picture() == [". . R:B R:C"]


def test_what_can_be_dropped_and_filtered(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=1))
    run.admit(0, 2)
    with pytest.raises(NotReady, match=rf"group {run.group('A')}\b"):
        sched.filter(run.group("A"), "x")
    run.complete("A")
    with pytest.raises(NotReady, match=rf"group {run.group('A')}\b"):
        sched.drop(run.group("A"), "x")
    run.take()
    for call in (sched.drop, sched.filter):
        with pytest.raises(NotReady, match=rf"group {run.group('A')}\b"):
            call(run.group("A"), "x")
    sched.drop(run.group("B"), "x")
    with pytest.raises(Fenced, match=rf"group {run.group('B')}\b"):
        sched.drop(run.group("B"), "x")
    run.verify()


def test_dropped_too_often(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=1, max_attempts=2))
    for status in ("requeued", "dead"):
        run.claims.clear()
        run.admit(0, 1)
        assert sched.drop(run.group("A"), "broken").status == status
        run.verify()
    assert sched.status().ledger.dead == 1
    run.claims.clear()
    assert run.admit(0, 1).startswith("B")


def test_dropped_workers_stop(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=2, group_size=2))
    run.admit(0, 2)
    sched.drop(run.group("A"), "by hand")
    assert [(c.member, c.reason) for c in sched.renew("w0").cancelled] == [(1, "by_hand"), (2, "by_hand")]
    with pytest.raises(Fenced):
        run.complete("A")


def test_group_occupies_when_its_last_member_is_in(sched: Scheduler) -> None:
    """7.4."""
    run = Named(sched, RunConfig(eta=1, batch_size=2, group_size=3))
    run.admit(0, 6)
    first, *others = run.claims["A"]
    run.claims["A"] = [first]
    assert run.complete("A").status == "open"
    assert run.picture()[0] == ". ."
    run.claims["A"] = others
    done = run.complete("A")
    assert (done.status, done.buffer, done.slot) == ("occupied", 0, 1)


def test_zero_variance_groups_are_filtered(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=2, group_size=2, filter_zero_variance=True))
    run.admit(0, 8)
    assert run.complete("A", (1.0, 1.0)).status == "filtered"
    assert run.complete("B", (1.0, 0.0)).status == "occupied"
    assert sched.status().ledger.filtered == 1
    assert run.admit(0, 2).startswith("E")  # the place is free at once


@pytest.mark.parametrize("reward", [0.5, 1 / 3, 0.1 + 0.2, 1e-300, -2.0 / 3, 123456789.123456789])
def test_equal_rewards_are_equal_whatever_their_digits(sched: Scheduler, reward: float) -> None:
    run = Named(
        sched, RunConfig(eta=1, batch_size=1, group_size=3, filter_zero_variance=True, max_attempts=1)
    )
    run.admit(0, 6)
    assert run.complete("A", (reward,) * 3).status == "filtered"
    assert run.complete("B", (reward, reward, reward + abs(reward) * 1e-15)).status == "occupied"
    batch = sched.take("t0")
    assert batch is not None
    assert batch.groups[0].members[0].reward == reward


def test_zero_is_zero_whatever_its_sign(sched: Scheduler) -> None:
    """A reward of -0.0, such as ``-penalty * 0``, equals 0.0."""
    run = Named(sched, RunConfig(eta=1, batch_size=1, group_size=2, filter_zero_variance=True))
    run.admit(0, 2)
    assert run.complete("A", (0.0, -0.0)).status == "filtered"
    assert b'"v_traj":-0' not in by_hand(sched, "reserve", "", "w0", "-0", "1")


def test_group_oversampling_cancels_the_rest(sched: Scheduler) -> None:
    """7.5: the first G members make the group."""
    run = Named(sched, RunConfig(eta=1, batch_size=2, group_size=2, group_candidates=4))
    run.admit(0, 3)
    lost = run.claims["A"].pop()
    assert run.complete("A").status == "occupied"
    told = sched.renew("w0").cancelled
    assert [(c.member, c.token, c.reason) for c in told] == [(3, lost.token, "group_complete")]
    assert sched.status().pending == 0
    said = [event for _, event in events_of(sched) if event["event"] == "cancelled"]
    assert [(e["group"], e["members"], e["reason"]) for e in said] == [
        (str(lost.group), "3,4", "group_complete")
    ]
    with pytest.raises(Fenced, match=rf"\b{lost.group}\.{lost.member}\b"):
        sched.release(lost)
    run.admit(0, 4)
    run.claims["B"] = run.claims["B"][:2]
    run.complete("B")
    assert run.take() == "AB"
    batch = sched.take("t0")
    assert batch is not None
    assert [[m.member for m in g.members] for g in batch.groups] == [[1, 2], [1, 2]]


def test_batch_oversampling(sched: Scheduler) -> None:
    """7.6: B = 2, S = 3; when both buffers are READY, the two Reserved left are hopeless."""
    run = Named(sched, RunConfig(eta=1, batch_size=2, buffer_slots=3))
    run.admit(0, 6)
    for name in "ABC":
        run.complete(name)
    assert run.picture() == ["O:A O:B R:D", "O:C R:E R:F"]
    run.complete("D")
    # Both buffers have a batch: nothing of version 0 is needed any more.
    assert run.picture() == ["O:A O:B .", "O:C O:D ."]
    assert {c.reason for c in sched.renew("w0").cancelled} == {"surplus"}
    assert sched.reserve("w0", 0, 1).refused == "window_full"
    assert sched.status().ledger.discarded == 2
    assert run.take() == "AB"
    run.publish(1)
    run.take()
    run.verify()


def test_batch_oversampling_leaves_reserved_groups_a_later_place(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=1, buffer_slots=2))
    assert run.admit(0, 3) == "A 1.2, B 1.1, C 0.2"
    assert run.complete("A").ready == 0
    assert run.picture() == ["O:A .", "R:B R:C"]
    assert run.admit(0, 1) == "D 0.2"
    assert run.take() == "A"  # D must leave buffer 0; buffer 1 is full, so it is not needed
    assert run.picture() == ["R:B R:C"]
    assert run.complete("C").ready == 1
    run.verify()
    assert sched.status().ledger.discarded == 2


def test_redundant_group_swaps_into_a_buffer_that_needs_one(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=2, batch_size=1, buffer_slots=2))
    assert run.admit(0, 6) == "A 2.2, B 2.1, C 1.2, D 1.1, E 0.2, F 0.1"
    run.complete("A")
    assert run.picture() == ["O:A R:E", "R:D R:C", "R:B R:F"]
    assert run.complete("E").buffer == 1  # buffer 0 has its batch: E changes places with D
    assert run.picture() == ["O:A R:D", "O:E R:C", "R:B R:F"]
    assert sched.verify() == []


def test_expiry_in_a_dying_group(sched: Scheduler) -> None:
    """A worker dies with two members of one group whose attempts are used up by the first."""
    sched.create(RunConfig(eta=1, batch_size=1, group_size=2, max_attempts=1))
    sched.reserve("w0", 0, 2)
    expire(sched, "w0")
    sched.renew("w1")
    assert sched.verify() == []
    assert sched.status().ledger.dead == 1


def test_surplus_is_cancelled_to_the_last(sched: Scheduler) -> None:
    """Also at the run's last step, and in several calls where there are many."""
    sched.create(RunConfig(eta=5, batch_size=1, buffer_slots=3, total_steps=2))
    claims = sched.reserve("w", 0, 6).reservations
    for claim in claims[:2]:
        sched.complete(claim, trajectory())
    assert len(sched.renew("w").cancelled) == 4
    with Scheduler(sched.url, "large") as large:
        large.create(RunConfig(eta=0, batch_size=1, buffer_slots=200))
        held = large.reserve("w", 0, 200).reservations
        large.complete(held[0], trajectory())
        for _ in range(13):
            large.renew("w")
        assert large.status().inflight == 0
        assert large.verify() == []
