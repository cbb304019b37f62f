"""Operators' calls: drain a worker, revive dead letters, pause."""

from __future__ import annotations

import getpass
import socket

import pytest
import redis

from roq import NotReady, RunConfig, RunEnded, Scheduler, UnknownWorker
from tests.protocol.play import by_hand, events_of, expire, trajectory


def test_a_drained_worker_gets_nothing_and_keeps_what_it_has(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    (claim,) = sched.reserve("w0", 0, 1).reservations
    assert not sched.renew("w0").draining
    assert sched.drain("w0", "its host goes") == 1
    assert sched.drain("w0") == 1  # again: nothing changes
    grant = sched.reserve("w0", 0, 4)
    assert (grant.reservations, grant.refused) == ([], "draining")
    assert sched.renew("w0").draining
    assert [w.draining for w in sched.status().workers] == [True]
    assert sched.complete(claim, trajectory(0)).status == "occupied"
    assert len(sched.reserve("w1", 0, 2).reservations) == 2
    sched.leave("w0")
    assert sched.verify() == []


def test_a_drained_worker_that_wakes_is_still_to_go(sched: Scheduler) -> None:
    """Its lease ran out before it learned of the drain."""
    sched.create(RunConfig(eta=1, batch_size=2))
    sched.reserve("w0", 0, 1)
    sched.drain("w0")
    expire(sched, "w0")
    sched.renew("observer")
    assert sched.reserve("w0", 0, 1).refused == "draining"
    assert sched.renew("w0").draining
    sched.leave("w0")
    assert sched.verify() == []
    assert sched.reserve("w0", 0, 1).refused is None, "once it has left, its name is free"


def test_only_attached_workers_drain(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    with pytest.raises(UnknownWorker, match="roq workers"):
        sched.drain("nobody")
    assert sched.verify() == []


def bury(sched: Scheduler) -> int:
    (claim,) = sched.reserve("w0", 0, 1).reservations
    assert sched.fail(claim, "no such tool").status == "dead"
    return claim.ordinal


def test_dead_letters_are_listed_and_come_back_first(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, max_attempts=1))
    buried = [bury(sched) for _ in range(3)]
    letters = sched.dead()
    assert [letter.ordinal for letter in letters] == buried == [0, 1, 2]
    assert {(x.reason, x.drops, x.attempt) for x in letters} == {("no such tool", 1, 1)}
    sched.revive(1)
    assert [letter.ordinal for letter in sched.dead()] == [0, 2]
    assert sched.verify() == []
    first, second = sched.reserve("w0", 0, 2).reservations
    assert (first.ordinal, first.attempt) == (1, 2)  # attempts count on: it is sampled anew
    assert second.ordinal == 3
    assert sched.verify() == []
    assert sched.audit().problems == []


def test_many_dead_letters(sched: Scheduler) -> None:
    """More than one page of them."""
    sched.create(RunConfig(eta=0, batch_size=1, max_attempts=1, pause_after_failures=None))
    count = 2500
    for _ in range(count):
        bury(sched)
    assert [letter.ordinal for letter in sched.dead()] == list(range(count))


def test_what_cannot_be_revived(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, max_attempts=1, total_steps=1))
    ordinal = bury(sched)
    with pytest.raises(NotReady, match=rf"\b{ordinal + 1}\b"):
        sched.revive(ordinal + 1)
    (claim,) = sched.reserve("w0", 0, 1).reservations
    sched.complete(claim, trajectory(0))
    sched.take("t0")
    sched.publish(1, "w/1", "t0")
    with pytest.raises(RunEnded):
        sched.revive(ordinal)
    assert sched.verify() == []


def test_a_revived_prompt_keeps_the_run_going(sched: Scheduler) -> None:
    """A run whose last prompt died ends, unless it is revived before the trainer asks."""
    sched.create(RunConfig(eta=0, batch_size=1, max_attempts=1, prompts=1))
    ordinal = bury(sched)
    sched.revive(ordinal)
    assert sched.take("t0") is None
    (claim,) = sched.reserve("w0", 0, 1).reservations
    assert claim.ordinal == ordinal
    sched.complete(claim, trajectory(0))
    assert sched.take("t0") is not None


def test_a_dead_letter_that_comes_back_continues_a_run_that_ended_for_want_of_prompts(
    sched: Scheduler,
) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, max_attempts=1, prompts=1, total_steps=1))
    ordinal = bury(sched)
    assert sched.take("t0") is None
    status = sched.status()
    assert (status.ended, status.end_reason) == (True, "prompts_exhausted")
    sched.revive(ordinal)
    assert not sched.status().ended
    assert sched.verify() == []
    (claim,) = sched.reserve("w0", 0, 1).reservations
    sched.complete(claim, trajectory(0))
    assert sched.take("t0") is not None
    sched.publish(1, "w/1", "t0")
    status = sched.status()
    assert (status.ended, status.end_reason) == (True, "total_steps")
    assert [e["event"] for _, e in events_of(sched)].count("reopened") == 1
    assert sched.audit().problems == []


def test_a_run_in_which_every_attempt_fails_is_paused(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, pause_after_failures=3))
    claims = sched.reserve("w0", 0, 4).reservations
    for claim in claims[:2]:
        sched.fail(claim, "no such tool")
    assert not sched.status().failing
    sched.fail(claims[2], "no such file")
    status = sched.status()
    assert (status.paused, status.failing, status.failed) == (True, True, 3)
    assert status.last_failure == "no such file"
    grant = sched.reserve("w0", 0, 4)
    assert (grant.reservations, grant.refused) == ([], "paused"), (
        "what was admitted is not tried again either"
    )
    sched.resume("fixed")
    assert not sched.status().failing
    retried, *_ = sched.reserve("w0", 0, 4).reservations
    assert retried.attempt == 2
    for _ in range(2):
        sched.fail(retried, "no such tool")
        retried, *_ = sched.reserve("w0", 0, 4).reservations
    assert not sched.status().failing, "the first attempts are forgiven"
    sched.complete(claims[3], trajectory(0))
    for _ in range(3):
        sched.fail(retried, "no such tool")
        retried, *_ = sched.reserve("w0", 0, 4).reservations
    assert not sched.status().failing, "not all attempts failed"
    assert sched.verify() == []
    assert sched.audit().problems == []


def test_post_processing_that_always_fails_pauses_the_run(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=4, post_process="mine:judge", pause_after_failures=2))
    for claim in sched.reserve("w0", 0, 2).reservations:
        judgement = sched.complete(claim, trajectory(0)).judgement
        assert judgement is not None
        sched.fail(judgement, "no such tool")
    assert sched.status().failing


def test_what_people_do_says_who_and_why(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, max_attempts=1))
    sched.pause("maintenance")
    sched.resume("done")
    sched.renew("w0")
    sched.drain("w0", "its host goes")
    first, second = sched.reserve("w1", 0, 2).reservations
    sched.drop(first.group, "broken")
    sched.revive(first.ordinal, "mended")
    sched.complete(second, trajectory(0))
    sched.filter(second.group, "dirty")
    said = {e["event"]: (e["reason"], e["by"]) for _, e in events_of(sched) if "by" in e}
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    assert said == {
        "paused": ("maintenance", who),
        "resumed": ("done", who),
        "draining": ("its host goes", who),
        "dead": ("broken", who),
        "revived": ("mended", who),
        "filtered": ("dirty", who),
    }


def test_texts_have_a_limit(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    with pytest.raises(redis.ResponseError, match=r"ROQ_INVALID.*65536"):
        by_hand(sched, "renew", "w0", "0", "x" * 70_000, "0")
    assert sched.status().workers == []


def test_reasons_typed_by_hand(sched: Scheduler) -> None:
    """An empty reason is valid; bytes that are not UTF-8 are refused, since a reply cannot hold them."""
    sched.create(RunConfig(eta=1, batch_size=4, post_process="m:f"))
    claims = sched.reserve("w0", 0, 4).reservations
    by_hand(sched, "drop", "", claims[0].group, "", "")
    assert [c.group for c in sched.renew("w0").cancelled] == [claims[0].group]
    for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80"):
        with pytest.raises(redis.ResponseError, match="ROQ_INVALID"):
            by_hand(sched, "drop", "", claims[1].group, bad, "")
    for good in ("é", "漢字", "🙂", "plain"):
        by_hand(sched, "drain", "w0", good, "")
    by_hand(sched, "drop", "", claims[1].group, "漢字 🙂", "")
    assert sched.renew("w0").cancelled[-1].reason == "漢字_🙂"
    assert sched.verify() == []


def test_a_finished_group_frees_its_place_under_the_cap(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, max_inflight=1, post_process="m:f"))
    (claim,) = sched.reserve("w0", 0, 1).reservations
    claim = sched.complete(claim, trajectory(0)).judgement
    assert claim is not None
    grant = sched.reserve("w1", 0, 1)
    assert grant.refused == "inflight_cap"
    sched.judge(claim)
    assert sched.wait(grant.signal, 5.0) > grant.signal
    assert sched.reserve("w1", 0, 1).refused is None


def test_settings_may_be_long(sched: Scheduler) -> None:
    settings = {"data.template": "é" * 100_000}
    assert sched.create(RunConfig(eta=1, batch_size=2), settings=settings)
    assert sched.settings() == settings


def test_reasons_of_every_kind(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=8, on_drop="discard", max_attempts=100))
    for reason in ("", "\0x", " ", "two words", "b\udcff", "x" * 5_000_000):
        claim = sched.reserve("w", 0, 1).reservations[0]
        sched.drop(claim.group, reason)
        assert [told.group for told in sched.renew("w").cancelled] == [claim.group]
        claim = sched.reserve("w", 0, 1).reservations[0]
        sched.fail(claim, reason)
        assert len(sched.status().workers[0].error) <= 2000
    assert sched.verify() == []
