"""Post-processing of finished groups before they are placed (roq_judge)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from roq import Fenced, Invalid, NotReady, Reservation, Response, RunConfig, Scheduler
from tests.protocol.play import by_hand, expire, trajectory

CONFIG = RunConfig(eta=1, batch_size=1, group_size=2, post_process="mine:judge", max_attempts=2)


def all_in(sched: Scheduler, worker: str = "w0", config: RunConfig = CONFIG) -> Reservation:
    """Complete a group; returns the claim on its post-processing."""
    sched.create(config)
    claims = sched.reserve(worker, 0, config.candidates).reservations
    first, second = claims[0], claims[-1]
    assert sched.complete(first, trajectory(0, 0.25)).status == "open"
    done = sched.complete(second, trajectory(0, 0.75))
    assert done.status == "judging"
    assert done.judgement is not None
    assert (done.judgement.member, done.judgement.worker, done.judgement.attempt) == (0, worker, 1)
    assert sched.verify() == []
    return done.judgement


def test_it_is_placed_with_its_advantages(sched: Scheduler) -> None:
    claim = all_in(sched)
    assert sched.take("t0") is None
    assert [t.reward for t in sched.group_trajectories(claim.group)] == [0.25, 0.75]
    third = 1 / 3
    done = sched.judge(claim, advantages=[-third, third])
    assert (done.status, done.buffer, done.slot, done.ready) == ("occupied", 0, 1, 0)
    assert sched.verify() == []
    batch = sched.take("t0")
    assert batch is not None
    assert [m.advantage for m in batch.groups[0].members] == [-third, third]  # all digits


def test_advantages_may_be_left_to_the_trainer(sched: Scheduler) -> None:
    sched.judge(all_in(sched))
    batch = sched.take("t0")
    assert batch is not None
    assert [m.advantage for m in batch.groups[0].members] == [None, None]


def test_it_may_be_filtered(sched: Scheduler) -> None:
    claim = all_in(sched)
    assert sched.judge(claim, keep=False, reason="dull").status == "filtered"
    assert sched.verify() == []
    assert sched.status().ledger.filtered == 1
    with pytest.raises(Fenced):
        sched.judge(claim)


def test_when_its_worker_dies_another_finishes_it(sched: Scheduler) -> None:
    dead = all_in(sched, "w0")
    expire(sched, "w0")
    grant = sched.reserve("w1", 0, 1)
    (claim,) = grant.reservations
    assert (claim.group, claim.member, claim.attempt) == (dead.group, 0, 2)
    assert claim.token > dead.token
    with pytest.raises(Fenced, match=rf"\b{dead.group}\.0\b.*\b{dead.token}\b.*\b{claim.token}\b"):
        sched.judge(dead)
    assert [(c.member, c.reason) for c in sched.renew("w0").cancelled] == [(0, "lease_expired")]
    assert sched.judge(claim).status == "occupied"
    assert sched.verify() == []
    assert sched.audit().problems == []


def test_weights_too_old_to_generate_will_do(sched: Scheduler) -> None:
    """A member could not go to a worker of version 0 any more; a finished group needs no weights."""
    config = RunConfig(eta=0, batch_size=1, post_process="mine:judge")
    sched.create(config)
    (claim,) = sched.reserve("w0", 0, 1).reservations
    claim = sched.complete(claim, trajectory(0)).judgement
    assert claim is not None
    sched.judge(claim)
    sched.take("t0")
    sched.publish(1, "w/1", "t0")
    (claim,) = sched.reserve("w0", 1, 1).reservations
    claim = sched.complete(claim, trajectory(1)).judgement
    assert claim is not None
    sched.release(claim)
    (again,) = sched.reserve("old", 0, 1).reservations
    assert again.member == 0
    assert sched.judge(again).status == "occupied"


def test_a_function_that_fails_for_good_buries_the_prompt(sched: Scheduler) -> None:
    claim = all_in(sched)
    assert sched.fail(claim, "judge raised").status == "pending"
    (claim,) = sched.reserve("w0", 0, 1).reservations
    assert sched.fail(claim, "judge raised again").status == "dead"
    assert [letter.reason for letter in sched.dead()] == ["judge raised again"]
    assert sched.verify() == []
    assert sched.status().payload_bytes == 0


def test_a_drop_stops_it(sched: Scheduler) -> None:
    claim = all_in(sched)
    sched.drop(claim.group, "by hand")
    assert [(c.member, c.token) for c in sched.renew("w0").cancelled] == [(0, claim.token)]
    with pytest.raises(Fenced):
        sched.judge(claim)
    assert sched.verify() == []


def test_who_completes_again_is_given_the_claim_again(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, post_process="mine:judge"))
    (member,) = sched.reserve("w0", 0, 1).reservations
    first = sched.complete(member, trajectory(0))
    assert sched.complete(member, trajectory(0)) == first


def test_the_rest_of_the_candidates_stop_before_it(sched: Scheduler) -> None:
    config = RunConfig(eta=1, batch_size=1, group_size=2, group_candidates=3, post_process="mine:judge")
    claim = all_in(sched, config=config)
    assert [(c.member, c.reason) for c in sched.renew("w0").cancelled] == [(2, "group_complete")]
    assert sched.judge(claim, advantages=[-1, 1]).status == "occupied"
    batch = sched.take("t0")
    assert batch is not None
    assert [(m.member, m.advantage) for m in batch.groups[0].members] == [(1, -1.0), (3, 1.0)]


def test_zero_variance_comes_first(sched: Scheduler) -> None:
    sched.create(msgspec.structs.replace(CONFIG, filter_zero_variance=True))
    first, second = sched.reserve("w0", 0, 2).reservations
    sched.complete(first, trajectory(0, 1.0))
    assert sched.complete(second, trajectory(0, 1.0)).status == "filtered"


@pytest.mark.parametrize(
    "advantages", [[], [1.0], [1.0, 2.0, 3.0], [float("nan"), 1.0], [1.0, float("inf")]], ids=str
)
def test_advantages_that_cannot_be(sched: Scheduler, advantages: list[float]) -> None:
    claim = all_in(sched)
    with pytest.raises(Invalid):
        sched.judge(claim, advantages=advantages)
    assert sched.judge(claim).status == "occupied"  # nothing was done


@pytest.mark.parametrize("advantages", [["x", 1], [None, 1], [[1.0], 2.0]], ids=str)
def test_advantages_that_are_no_numbers(sched: Scheduler, advantages: list[Any]) -> None:
    claim = all_in(sched)
    with pytest.raises(Invalid, match="advantages"):
        sched.judge(claim, advantages=advantages)
    assert sched.judge(claim).status == "occupied"


@pytest.mark.parametrize("advantages", ["x", "3", '{"a":1}', "[null,1]", "[[1],2]", '["1e999","1"]'])
def test_advantages_typed_by_hand(sched: Scheduler, advantages: str) -> None:
    claim = all_in(sched)
    values = ("", str(claim.group), str(claim.token), claim.worker, "1", "", advantages)
    with pytest.raises(Exception, match="ROQ_INVALID"):
        by_hand(sched, "judge", *values)
    assert sched.judge(claim).status == "occupied"


def test_it_is_no_trajectory(sched: Scheduler) -> None:
    claim = all_in(sched)
    with pytest.raises(Invalid, match="judge"):
        sched.complete(claim, trajectory(0))
    with pytest.raises(Invalid, match="post-processing"):
        sched.save_prefix(claim, Response([1], [-1.0], [(0, 1)]))
    with pytest.raises(Invalid, match="post-processing"):
        sched.release(claim, Response([1], [-1.0], [(0, 1)]))
    with pytest.raises(NotReady):
        sched.filter(claim.group, "it is not placed yet")
    assert sched.judge(claim).status == "occupied"


def test_members_of_a_group_that_is_gone(sched: Scheduler) -> None:
    claim = all_in(sched)
    sched.drop(claim.group, "x")
    with pytest.raises(Fenced, match=rf"group {claim.group}\b"):
        sched.group_trajectories(claim.group)
