"""Take, publish, checkpoints, replay, the trainer's fencing, the end of the run, weights and their pins."""

from __future__ import annotations

import json

import pytest

from roq import Fenced, Invalid, NotReady, RunConfig, RunEnded, Scheduler, StateLost, UnknownWeights
from roq.protocol.keys import keys_of
from tests.conftest import Server
from tests.protocol.play import Named, expire, trajectory


def fill(sched: Scheduler, version: int, groups: int) -> None:
    """Complete ``groups`` new groups."""
    for claim in sched.reserve("w0", version, groups).reservations:
        sched.complete(claim, trajectory(claim.v_traj, reward=claim.ordinal))
    assert sched.verify() == []


def step(sched: Scheduler, version: int, trainer: str = "t0") -> None:
    fill(sched, version, 2)
    assert sched.take(trainer) is not None
    sched.publish(version + 1, f"w/{version + 1}", trainer)
    assert sched.verify() == []


CONFIG = RunConfig(eta=1, batch_size=2)


def test_taking_again_returns_the_same_batch(sched: Scheduler) -> None:
    sched.create(CONFIG)
    fill(sched, 0, 3)
    batch = sched.take("t0")
    assert batch is not None
    assert sched.take("t0") == batch
    assert sched.take("t1") == batch  # a restarted trainer resumes where the dead one stopped
    payloads = sched.trajectories(batch.groups)
    assert [t.reward for members in payloads for t in members] == [
        m.reward for g in batch.groups for m in g.members
    ]
    with pytest.raises(Fenced, match="t1"):
        sched.publish(1, "w/1", "t0")
    sched.publish(1, "w/1", "t1")
    assert sched.verify() == []


def test_a_superseded_trainer_stays_fenced(sched: Scheduler) -> None:
    sched.create(CONFIG)
    fill(sched, 0, 2)
    for trainer in ("t0", "t1", "t2"):
        assert sched.take(trainer) is not None
    for trainer in ("t0", "t1"):
        with pytest.raises(Fenced):
            sched.take(trainer)
        with pytest.raises(Fenced):
            sched.checkpointed(0, trainer)
    assert sched.take("t2") is not None


def test_published_figures_are_kept_with_the_event(sched: Scheduler, server: Server) -> None:
    sched.create(CONFIG)
    fill(sched, 0, 2)
    sched.take("t0")
    figures = {"reward/mean": 0.123456789, "tokens/response": 12}
    sched.publish(1, "w/1", "t0", figures)
    sched.publish(1, "w/1", "t0", {"reward/mean": 9.0})  # again: nothing changes
    events = server.redis.xrange(keys_of(sched.run)["events"])
    assert [json.loads(e[b"metrics"]) for _, e in events if e[b"event"] == b"publish"] == [figures]


def test_figures_of_any_size_are_refused(sched: Scheduler) -> None:
    sched.create(CONFIG)
    fill(sched, 0, 2)
    sched.take("t0")
    with pytest.raises(Invalid, match=r"metrics.*4096"):
        sched.publish(1, "w/1", "t0", {f"x{i}": float(i) for i in range(1000)})
    assert sched.status().version == 0


def test_publish_out_of_order(sched: Scheduler) -> None:
    sched.create(CONFIG)
    with pytest.raises(NotReady, match=r"\btake\b"):
        sched.publish(1, "w/1", "t0")
    assert sched.take("t0") is None
    with pytest.raises(NotReady, match=r"version 1\b.*batch 0\b"):
        sched.publish(1, "w/1", "t0")
    step(sched, 0)
    with pytest.raises(NotReady, match=r"version 3\b.*batch 2\b"):
        sched.publish(3, "w/3", "t0")
    sched.publish(1, "w/1", "t0")  # again: nothing changes
    assert sched.status().version == 1
    assert sched.status().ledger.trained == 2


def test_batches_are_kept_until_a_checkpoint_covers_them(sched: Scheduler) -> None:
    sched.create(CONFIG)
    batches = []
    for version in range(4):
        fill(sched, version, 2)
        batches.append(sched.take("t0"))
        sched.publish(version + 1, f"w/{version + 1}", "t0")
    sched.checkpointed(2, "t0")
    assert sched.verify() == []
    for version in (2, 3):
        again = sched.take("t1", version=version)
        assert again is not None
        assert again.replay
        assert again.groups == batches[version].groups
        assert len(sched.trajectories(again.groups)) == 2
    assert sched.take("t1", version=4) is None
    with pytest.raises(StateLost, match=r"checkpoint 2\b"):
        sched.take("t1", version=1)
    with pytest.raises(StateLost, match=r"payloads 1\.1, 2\.1"):
        sched.trajectories(batches[0].groups)
    sched.checkpointed(4, "t1")
    assert sched.status().payload_bytes == 0
    assert sched.verify() == []


def test_checkpoint_of_an_unpublished_version(sched: Scheduler) -> None:
    sched.create(CONFIG)
    step(sched, 0)
    with pytest.raises(NotReady, match=r"\b2\b.*\b1\b"):
        sched.checkpointed(2, "t0")


def test_trainer_ahead_of_the_server(sched: Scheduler) -> None:
    sched.create(CONFIG)
    step(sched, 0)
    with pytest.raises(StateLost, match=r"\b2\b.*\b1\b"):
        sched.take("t0", version=2)


def test_large_batches_are_freed_in_portions(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=100))
    fill(sched, 0, 100)
    assert sched.take("t0") is not None
    sched.publish(1, "w/1", "t0")
    sched.checkpointed(1, "t0")
    assert sched.status().payload_bytes == 0
    assert sched.verify() == []


def test_end_by_steps(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, total_steps=2))
    step(sched, 0)
    assert not sched.status().ended
    step(sched, 1)
    assert sched.status().ended
    assert sched.renew("w0").ended
    with pytest.raises(RunEnded):
        sched.take("t0")
    assert sched.status().ledger.in_slots == 0


def test_end_by_prompts(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, prompts=5))
    step(sched, 0)
    step(sched, 1)
    held = sched.reserve("w0", 2, 1).reservations[0]
    assert sched.take("t0") is None  # the last prompt is still being generated
    sched.complete(held, trajectory(2))
    assert sched.take("t0") is None  # one group is not a batch: this ends the run
    with pytest.raises(RunEnded):
        sched.take("t0")
    status = sched.status()
    assert status.ended
    assert (status.ledger.in_slots, status.ledger.trained, status.ledger.balanced) == (1, 4, True)


def test_an_ended_run_can_still_be_replayed(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, total_steps=2))
    step(sched, 0)
    step(sched, 1)
    assert sched.take("t1", version=0) is not None
    assert sched.take("t1", version=1) is not None
    with pytest.raises(RunEnded):
        sched.take("t1", version=2)
    sched.checkpointed(2, "t1")
    assert sched.verify() == []


def test_stuck_timeout_drops_what_the_trainer_waits_for(sched: Scheduler) -> None:
    import time

    run = Named(sched, RunConfig(eta=1, batch_size=2, stuck_timeout_s=0.1))
    assert run.admit(0, 4) == "A 1.2, B 1.1, C 0.2, D 0.1"
    run.complete("A")
    assert run.picture() == ["O:A R:C", "R:B R:D"]
    assert run.take() is None  # the clock starts here
    time.sleep(0.15)
    assert run.take() is None
    assert run.picture() == ["O:A .", "R:B R:D"]
    assert [c.reason for c in sched.renew("w0").cancelled] == ["stuck_timeout"]
    assert sched.status().ledger.requeued == 1
    assert run.admit(0, 1) == ""  # C again: requeued prompts go first
    assert run.claims["C"][-1].attempt == 2  # sampled with other seeds
    assert sched.status().ledger.requeued == 0


def test_weights_are_pinned_and_retired(sched: Scheduler) -> None:
    sched.create(CONFIG, weights="base")
    assert sched.pin("w0").location == "base"
    for version in range(5):
        step(sched, version)
    assert sched.pin("w0", 2).version == 2
    assert sched.pin("w1", 3).location == "w/3"
    sched.renew("w1", version=3)
    retired = sched.retire_weights("t0", keep=1)
    assert [w.version for w in retired] == [1, 4]  # 0 is the user's own model, 5 the newest
    assert sched.retire_weights("t0", keep=1) == []
    with pytest.raises(UnknownWeights, match="newest"):
        sched.pin("w0", 1)
    sched.renew("w0", version=2)
    sched.renew("w0", version=5)
    assert [w.version for w in sched.retire_weights("t0", keep=1)] == [2]
    expire(sched, "w1")
    sched.reserve("w0", 5, 0)
    assert [w.version for w in sched.retire_weights("t0", keep=1)] == [3]
    assert sched.verify() == []


def test_a_sender_is_told_to_workers_until_another_trainer_takes_over(sched: Scheduler) -> None:
    sched.create(CONFIG, weights="w/0")
    with pytest.raises(NotReady, match="take"):
        sched.announce_sender("h:1/s", "t0")
    step(sched, 0)
    assert sched.pin("w0").sender == ""
    sched.announce_sender("h:1/s", "t0")
    assert sched.pin("w0").sender == sched.pin("w0", version=0).sender == "h:1/s"
    assert [w.sender for w in sched.weights()] == ["h:1/s", "h:1/s"]
    with pytest.raises(Invalid, match=r"\b513\b.*\b512\b"):
        sched.announce_sender("x" * 513, "t0")
    fill(sched, 1, 2)
    assert sched.take("t1") is not None
    assert sched.pin("w0").sender == "", "the new trainer has none yet"
    with pytest.raises(Fenced):
        sched.announce_sender("h:1/s", "t0")
    sched.announce_sender("h:2/s", "t1")
    assert sched.pin("w0").sender == "h:2/s"
    sched.announce_sender("", "t1")
    assert sched.pin("w0").sender == ""
    assert sched.verify() == []


def test_the_stuck_timeout_drops_all_that_was_there(sched: Scheduler) -> None:
    import time

    sched.create(RunConfig(eta=0, batch_size=40, stuck_timeout_s=0.2, on_drop="discard"))
    sched.reserve("w", 0, 40)
    sched.take("t1")
    time.sleep(0.3)
    assert sched.take("t2") is None  # which starts to wait now
    assert sched.status().ledger.in_slots == 40
    time.sleep(0.3)
    for _ in range(4):
        sched.take("t2")
    assert sched.status().ledger.discarded == 40
    assert sched.verify() == []


def test_a_batch_in_training_loses_a_group_and_is_refilled_from_later_buffers(sched: Scheduler) -> None:
    sched.create(CONFIG)
    fill(sched, 0, 3)
    batch = sched.take("t0")
    assert batch is not None
    first, bad = (group.group for group in batch.groups)
    (waiting,) = {1, 2, 3} - {first, bad}
    assert sched.reject(bad, "token 96 is outside the vocabulary").status == "requeued"
    assert sched.verify() == []
    with pytest.raises(NotReady, match="reject"):
        sched.publish(1, "w/1", "t0")  # of what was trained on the old batch
    amended = sched.take("t0")
    assert amended is not None
    assert (amended.version, [group.group for group in amended.groups]) == (0, [first, waiting])
    assert sched.take("t1") == amended
    assert sched.audit().problems == []
    sched.publish(1, "w/1", "t1")
    with pytest.raises(NotReady, match="trained"):
        sched.reject(first, "too late")
    with pytest.raises(Fenced):
        sched.reject(bad, "again")
    assert sched.status().ledger.requeued == 1
    assert sched.audit().staleness == {0: 2}
    assert sched.verify() == []


def test_a_batch_that_nothing_can_refill_waits_for_new_work(sched: Scheduler) -> None:
    """With eta 0 nothing else is in the run: its own buffer opens for admission again."""
    sched.create(RunConfig(eta=0, batch_size=2, on_drop="discard"))
    fill(sched, 0, 2)
    batch = sched.take("t0")
    assert batch is not None
    assert sched.reserve("w0", 0, 1).refused == "worker_stale"
    assert sched.reject(batch.groups[0].group, "bad").status == "discarded"
    assert sched.take("t0") is None
    fill(sched, 0, 1)
    amended = sched.take("t0")
    assert amended is not None
    assert (amended.groups[0].group, len(amended.groups)) == (batch.groups[1].group, 2)
    sched.publish(1, "w/1", "t0")
    assert sched.audit().problems == []
    assert sched.verify() == []


def test_a_prompt_whose_groups_are_always_rejected_becomes_a_dead_letter(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, max_attempts=2))
    statuses: list[str] = []
    for _ in range(2):
        fill(sched, 0, 1)
        batch = sched.take("t0")
        assert batch is not None
        statuses.append(sched.reject(batch.groups[0].group, "bad").status)
    assert statuses == ["requeued", "dead"]
    assert [letter.reason for letter in sched.dead()] == ["bad"]
    with pytest.raises(NotReady, match="unfinished"):
        sched.reject(sched.reserve("w0", 0, 1).reservations[0].group, "bad")
