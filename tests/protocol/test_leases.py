"""Leases, fencing tokens, re-issue, kept prefixes, cancellations."""

from __future__ import annotations

import time

import msgspec
import pytest

from roq import Fenced, Invalid, Response, RunConfig, Scheduler, UnknownGroup
from roq.types import Reservation
from tests.protocol.play import expire, trajectory

CONFIG = RunConfig(eta=1, batch_size=4, lease_s=30)


def claim_of(sched: Scheduler, worker: str = "w0", version: int = 0) -> Reservation:
    return sched.reserve(worker, version, 1).reservations[0]


def test_expired_claim_is_issued_again_under_a_higher_token(sched: Scheduler) -> None:
    sched.create(CONFIG)
    first = claim_of(sched)
    expire(sched, "w0")
    second = claim_of(sched, "w1")
    assert (second.group, second.ordinal) == (first.group, first.ordinal)
    assert (second.buffer, second.slot) == (first.buffer, first.slot)
    assert second.token > first.token
    assert (first.attempt, second.attempt) == (1, 2)
    assert sched.verify() == []


def test_late_worker_is_fenced_and_told(sched: Scheduler) -> None:
    sched.create(CONFIG)
    first = claim_of(sched)
    expire(sched, "w0")
    second = claim_of(sched, "w1")
    superseded = rf"\b{first.group}\.{first.member}\b.*\b{first.token}\b.*\b{second.token}\b"
    with pytest.raises(Fenced, match=superseded):
        sched.complete(first, trajectory())
    with pytest.raises(Fenced, match=superseded):
        sched.release(first)
    with pytest.raises(Fenced, match=superseded):
        sched.save_prefix(first, Response([1], [-1.0], [(0, 1)]))
    told = sched.renew("w0").cancelled
    assert [(c.group, c.member, c.token, c.reason) for c in told] == [
        (first.group, 1, first.token, "lease_expired")
    ]
    assert sched.complete(second, trajectory()).status == "occupied"
    assert sched.verify() == []


def test_cancellations_are_told_until_acknowledged(sched: Scheduler) -> None:
    sched.create(CONFIG)
    claim_of(sched)
    expire(sched, "w0")
    sched.status()
    claim_of(sched, "w1")
    assert len(sched.renew("w0").cancelled) == 1
    assert sched.renew("w0").cancelled == []  # this client acknowledged it
    with Scheduler(sched.url, sched.run) as other:
        assert other.renew("w0").cancelled == []
    assert sched.verify() == []


def test_lost_renewal_reply_loses_no_cancellation(sched: Scheduler) -> None:
    sched.create(CONFIG)
    claim_of(sched)
    expire(sched, "w0")
    claim_of(sched, "w1")
    with Scheduler(sched.url, sched.run) as lost:
        lost.renew("w0")  # its reply never arrived, so nobody acknowledges it
    assert len(sched.renew("w0").cancelled) == 1


def test_heartbeat_keeps_a_long_rollout(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, lease_s=0.2))
    claim = claim_of(sched)
    for _ in range(10):
        time.sleep(0.1)
        sched.renew("w0")
        assert sched.reserve("w1", 0, 0).reservations == []
    assert sched.complete(claim, trajectory()).status == "occupied"


def test_lease_runs_out_by_the_servers_clock(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, lease_s=0.1))
    first = claim_of(sched)
    time.sleep(0.25)
    assert claim_of(sched, "w1").group == first.group


def test_completion_before_the_reissue_counts(sched: Scheduler) -> None:
    sched.create(CONFIG)
    claim = claim_of(sched)
    expire(sched, "w0")
    assert sched.complete(claim, trajectory()).status == "occupied"
    assert claim_of(sched, "w1").group != claim.group


def test_many_expired_claims_come_back(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=9, batch_size=40, lease_s=30))
    held = [r for _ in range(2) for r in sched.reserve("w0", 0, 200).reservations]
    assert len(held) == 400  # ten times a batch
    expire(sched, "w0")
    again: list[Reservation] = []
    for _ in range(20):
        again += sched.reserve("w1", 0, 40).reservations
        assert sched.verify() == []
    assert {r.group for r in again} == {r.group for r in held}


def test_reissue_starts_clean_with_fresh_weights(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=2, batch_size=1))
    first, other = sched.reserve("w0", 0, 2).reservations
    sched.complete(other, trajectory())
    assert sched.take("t0") is not None
    sched.publish(1, "w/1", "t0")
    expire(sched, "w0")
    second = claim_of(sched, "w1", version=1)
    assert (second.group, second.prefix, second.v_traj) == (first.group, None, 1)
    assert sched.verify() == []


def test_prefix_moves_to_another_worker_with_its_segments(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=2, batch_size=1))
    first, other = sched.reserve("w0", 0, 2).reservations
    sched.complete(other, trajectory())
    assert sched.take("t0") is not None
    sched.publish(1, "w/1", "t0")
    kept = Response([5, 6], [-0.1, -0.2], [(0, 2)])
    assert sched.release(first, prefix=kept).status == "pending"
    assert sched.verify() == []
    second = claim_of(sched, "w1", version=1)
    assert second.prefix == kept
    assert second.v_traj == 0  # the prefix is of version 0
    whole = trajectory(0, tokens=3, newest=1)
    assert sched.complete(second, whole).status == "occupied"
    assert sched.verify() == []


def test_saved_prefix_survives_a_crash(sched: Scheduler) -> None:
    sched.create(CONFIG)
    first = claim_of(sched)
    sched.save_prefix(first, Response([5], [-0.1], [(0, 1)]))
    longer = Response([5, 6], [-0.1, -0.2], [(0, 2)])
    sched.save_prefix(first, longer)
    assert sched.verify() == []
    expire(sched, "w0")
    assert claim_of(sched, "w1").prefix == longer
    assert sched.verify() == []


def test_failed_attempts_are_capped(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, max_attempts=3))
    for attempt in range(1, 4):
        claim = claim_of(sched)
        assert (claim.ordinal, claim.attempt, claim.prefix) == (0, attempt, None)
        sched.save_prefix(claim, Response([5], [-0.1], [(0, 1)]))
        answer = sched.fail(claim, "reward raised ValueError")
        assert answer.status == ("dead" if attempt == 3 else "pending")
        assert sched.verify() == []
    status = sched.status()
    assert status.ledger.dead == 1
    assert status.workers[0].error == "reward raised ValueError"
    assert claim_of(sched).ordinal == 1


def test_detaching_is_no_failure(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, max_attempts=1))
    for _ in range(5):
        assert sched.release(claim_of(sched), reason="detach").status == "pending"


def test_a_prompt_that_kills_its_workers_is_buried(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, group_size=2, max_attempts=2))
    for n in range(2):
        sched.reserve(f"w{n}", 0, 2)
        expire(sched, f"w{n}")
    grant = sched.reserve("w2", 0, 1)
    assert sched.verify() == []
    assert sched.status().ledger.dead == 1
    assert grant.reservations[0].ordinal == 1


def test_leave_hands_everything_back(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=4, batch_size=20))
    held = sched.reserve("w0", 0, 100).reservations
    sched.leave("w0")
    sched.leave("w0")
    assert sched.verify() == []
    status = sched.status()
    assert (status.workers, status.inflight, status.pending) == ([], 0, 100)
    assert {r.group for r in sched.reserve("w1", 0, 100).reservations} == {r.group for r in held}


def test_claims_of_another_worker(sched: Scheduler) -> None:
    sched.create(CONFIG)
    claim = claim_of(sched)
    with pytest.raises(Fenced):
        sched.complete(msgspec.structs.replace(claim, worker="thief"), trajectory())


def test_groups_that_never_were(sched: Scheduler) -> None:
    sched.create(CONFIG)
    claim = claim_of(sched)
    with pytest.raises(UnknownGroup):
        sched.complete(msgspec.structs.replace(claim, group=99), trajectory())
    with pytest.raises(Invalid, match=rf"group {claim.group}\b.*\b2\b"):
        sched.complete(msgspec.structs.replace(claim, member=2), trajectory())


@pytest.mark.parametrize("segment", [0, 2])
def test_versions_that_cannot_be(sched: Scheduler, segment: int) -> None:
    sched.create(RunConfig(eta=2, batch_size=1))
    sched.complete(claim_of(sched), trajectory())
    sched.take("t0")
    sched.publish(1, "w/1", "t0")
    claim = claim_of(sched, version=1)
    with pytest.raises(Invalid, match=rf"\b{segment}\b.*\b1\b"):
        sched.complete(claim, trajectory(segment))
    assert sched.verify() == []


def test_data_above_the_limit(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, max_trajectory_bytes=1024))
    claim = claim_of(sched)
    large = Response([1] * 500, [-1.0] * 500, [(0, 500)])
    calls = (
        lambda: sched.complete(claim, trajectory(tokens=500)),
        lambda: sched.save_prefix(claim, large),
        lambda: sched.release(claim, large),
    )
    for call in calls:
        with pytest.raises(Invalid, match="max_trajectory_bytes"):
            call()
    assert sched.complete(claim, trajectory()).status == "occupied"
    assert sched.verify() == []


def test_tokens_from_the_future_and_members_completed_twice(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, group_size=2))
    claim = claim_of(sched)
    with pytest.raises(Fenced):
        sched.complete(msgspec.structs.replace(claim, token=claim.token + 100), trajectory())
    assert sched.complete(claim, trajectory(reward=0.25)).status == "open"
    assert sched.complete(claim, trajectory(reward=0.75)).status == "open"  # the first one counts
    assert sched.status().payload_bytes < 200
    with pytest.raises(Fenced, match=rf"\b{claim.group}\.{claim.member}\b"):
        sched.release(claim)
    assert sched.verify() == []


def test_workers_with_names_that_begin_alike(sched: Scheduler) -> None:
    sched.create(CONFIG)
    for worker in ("w1", "w10", "w1.", "w1-a"):
        sched.reserve(worker, 0, 1)
    expire(sched, "w1")
    assert len(sched.reserve("w2", 0, 9).reservations) == 5  # w1's claim and four Empty slots
    assert sched.verify() == []
