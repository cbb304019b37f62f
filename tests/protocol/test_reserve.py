"""Reserve: admission, every refusal, and concurrent clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from roq import Invalid, RunConfig, Scheduler, StateLost, UnknownRun
from tests.protocol.play import Named, trajectory


def test_needs_a_run(sched: Scheduler) -> None:
    with pytest.raises(UnknownRun, match="'test'"):
        sched.reserve("w0", 0, 1)


def test_window_full(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=2))
    grant = sched.reserve("w0", 0, 5)
    assert len(grant.reservations) == 2
    assert grant.refused == "window_full"


def test_refused_is_none_when_all_was_given(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=2))
    assert sched.reserve("w0", 0, 2).refused is None


def test_inflight_cap(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=3, batch_size=4, max_inflight=3))
    grant = sched.reserve("w0", 0, 5)
    assert (len(grant.reservations), grant.refused) == (3, "inflight_cap")
    sched.complete(grant.reservations[0], trajectory())
    assert len(sched.reserve("w1", 0, 5).reservations) == 1


def test_paused(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    held = sched.reserve("w0", 0, 1).reservations[0]
    sched.pause()
    assert sched.reserve("w0", 0, 1).refused == "paused"
    sched.release(held)
    grant = sched.reserve("w1", 0, 2)
    assert [r.ordinal for r in grant.reservations] == [0]  # admitted groups continue
    assert grant.refused == "paused"
    sched.resume()
    assert sched.reserve("w0", 0, 1).refused is None


def test_exhausted(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, prompts=2, epochs=1))
    grant = sched.reserve("w0", 0, 4)
    assert (len(grant.reservations), grant.refused) == (2, "exhausted")


def test_epochs_repeat_the_data(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, prompts=2, epochs=2))
    grant = sched.reserve("w0", 0, 4)
    assert [r.ordinal for r in grant.reservations] == [0, 1, 2, 3]


def test_bytes(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, max_payload_bytes=10))
    claim = sched.reserve("w0", 0, 1).reservations[0]
    sched.complete(claim, trajectory())
    assert sched.reserve("w0", 0, 1).refused == "bytes"


@pytest.mark.parametrize("batches", [0.4, 1.7])
def test_the_byte_budget_never_wedges_a_run(sched: Scheduler, batches: float) -> None:
    """Only a checkpoint frees bytes, and it may need more batches than the budget holds."""
    budget = int(len(trajectory().encode()) * 2 * batches)
    sched.create(RunConfig(eta=1, batch_size=2, max_payload_bytes=budget))
    done, refused = 0, 0
    for _ in range(60):
        batch = sched.take("t0", done)
        if batch is not None:
            done += 1
            sched.publish(done, "w", "t0")
            if done % 10 == 0:
                sched.checkpointed(done, "t0")
        grant = sched.reserve("w0", done, 8)
        refused += grant.refused == "bytes"
        for claim in grant.reservations:
            sched.complete(claim, trajectory(done))
    assert done >= 20
    assert refused > 0
    assert sched.verify() == []


def test_worker_stale_until_it_syncs(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=0, batch_size=1))
    run.admit(0, 1)
    run.complete("A")
    assert run.take() == "A"
    run.publish(1)
    assert sched.reserve("w1", 0, 1).refused == "worker_stale"
    assert sched.reserve("w1", 1, 1).refused is None


def test_a_worker_that_lags_gets_an_earlier_deadline(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=2))
    run.admit(0, 2)
    run.complete("A")
    run.complete("B")
    run.take()
    run.publish(1)
    assert run.admit(0, 1) == "C 1.2"
    assert run.admit(1, 1) == "D 2.2"


def test_unpublished_version(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    with pytest.raises(StateLost, match=r"\b0\b"):
        sched.reserve("w0", 1, 1)


@pytest.mark.parametrize("worker", ["", "a b", "-x", "x" * 200, "w\n"])
def test_worker_names_are_checked(sched: Scheduler, worker: str) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    with pytest.raises(Invalid, match="name"):
        sched.reserve(worker, 0, 1)


def test_eta_zero_is_synchronous(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=0, batch_size=2))
    for version in range(3):
        first, second = "ABCDEF"[2 * version], "ABCDEF"[2 * version + 1]
        assert run.admit(version, 9) == f"{first} {version}.2, {second} {version}.1"
        run.complete(second)
        run.complete(first)
        assert run.take() == second + first
        assert run.sched.reserve("w0", version, 9).refused == "worker_stale"  # not while it trains
        run.publish(version + 1)


def test_total_steps_bound_the_window(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=5, batch_size=1, total_steps=2))
    assert run.admit(0, 9) == "A 1.1, B 0.1"
    for step, name in enumerate("AB"):
        run.complete(name)
        assert run.take() == name
        run.publish(step + 1)
    grant = sched.reserve("w0", 2, 1)
    assert (grant.refused, grant.ended) == ("exhausted", True)
    assert sched.status().ledger.balanced


def test_a_group_is_shared_by_workers(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, group_size=4))
    first = sched.reserve("w0", 0, 3).reservations
    second = sched.reserve("w1", 0, 3).reservations
    assert [(r.group, r.member) for r in first] == [(1, 1), (1, 2), (1, 3)]
    assert [(r.group, r.member) for r in second] == [(1, 4), (2, 1), (2, 2)]
    assert sched.verify() == []


def test_a_lagging_worker_takes_a_member_only_while_the_place_stays_legal(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=1, group_size=2))
    run.admit(0, 2)
    run.complete("A", (0.0, 1.0))
    assert run.take() == "A"
    run.publish(1)
    assert run.admit(1, 1) == "B 2.1"
    lagging = sched.reserve("old", 0, 1)
    assert [r.ordinal for r in lagging.reservations] == [2]  # B's buffer 2 is too late for version 0
    assert lagging.reservations[0].buffer == 1
    assert [r.ordinal for r in sched.reserve("new", 1, 1).reservations] == [1]
    assert sched.verify() == []


def test_clients_that_ask_at_once_share_nothing(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=100))

    def ask(worker: int) -> list[tuple[int, int, int, int]]:
        with Scheduler(sched.url, sched.run) as own:
            taken = [own.reserve(f"w{worker}", 0, 3).reservations for _ in range(12)]
        return [(r.group, r.ordinal, r.buffer, r.slot) for some in taken for r in some]

    with ThreadPoolExecutor(8) as pool:
        claims = [claim for some in pool.map(ask, range(8)) for claim in some]
    assert len(claims) == 200
    for what in (0, 1):  # groups and ordinals are given once
        assert len({claim[what] for claim in claims}) == 200
    assert len({(buffer, slot) for _, _, buffer, slot in claims}) == 200
    assert sched.verify() == []


def test_one_client_shared_by_threads(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=200))
    with ThreadPoolExecutor(80) as pool:  # more than a client's lanes
        grants = list(pool.map(lambda _: sched.reserve("w0", 0, 2), range(150)))
    assert len({r.token for grant in grants for r in grant.reservations}) == 300
    assert sched.verify() == []
