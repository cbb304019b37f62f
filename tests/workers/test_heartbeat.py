"""The heartbeat renews while the main thread is blocked, and stops when the worker makes no progress."""

from __future__ import annotations

import json
import time
from typing import Any

from roq import RunConfig, Scheduler, Trajectory
from roq.errors import RoqError, ServerUnavailable, UnknownRun
from roq.types import Renewal
from roq_worker.heartbeat import Heartbeat, Renewer


def heartbeat(scheduler: Renewer, lease_s: float, **changes: Any) -> tuple[Heartbeat, dict[str, list[Any]]]:
    got: dict[str, list[Any]] = {"renewals": [], "failures": [], "said": []}
    beat = Heartbeat(
        scheduler,
        "w",
        lease_s,
        on_renewal=got["renewals"].append,
        on_failure=got["failures"].append,
        say=got["said"].append,
        **changes,
    )
    beat.info = {"doing": "testing", "version": 0}
    return beat, got


def test_a_busy_main_thread_does_not_stop_it(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, lease_s=0.6), weights="v0")
    (claim,) = sched.reserve("w", 0, 1).reservations
    with Scheduler(sched.url, sched.run) as own:
        beat, got = heartbeat(own, lease_s=0.6)
        beat.start()
        until = time.monotonic() + 3.0
        while time.monotonic() < until:  # pure Python: holds the GIL except for the interpreter's switches
            sum(i * i for i in range(1000))
        beat.stop()
    assert len(got["renewals"]) >= 8
    assert not any(renewal.cancelled for renewal in got["renewals"])
    (worker,) = sched.status().workers
    assert json.loads(worker.info) == {"doing": "testing", "version": 0}
    # Five lease times later the claim is still good.
    assert sched.complete(claim, Trajectory([1], [2], [-1.0], [(0, 1)], 1.0)).status == "occupied"


def test_a_stalled_worker_loses_its_claims_until_it_moves_again(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=1, lease_s=0.3), weights="v0")
    assert sched.reserve("w", 0, 1).reservations
    with Scheduler(sched.url, sched.run) as own:
        beat, got = heartbeat(own, lease_s=0.3, stalled_after_s=0.5)
        beat.start()
        time.sleep(0.4)
        assert not sched.reserve("other", 0, 1).reservations, "renewed until then"
        time.sleep(0.8)
        assert len(got["said"]) == 1
        assert "no progress" in got["said"][0]
        (claim,) = sched.reserve("other", 0, 1).reservations
        assert claim.attempt == 2
        beat.tick()
        time.sleep(0.3)
        beat.stop()
    told = [cancelled.reason for renewal in got["renewals"] for cancelled in renewal.cancelled]
    assert told
    assert set(told) == {"lease_expired"}


class Renewals:
    """Raise errors that a real server cannot be made to raise on demand."""

    def __init__(self, *errors: RoqError) -> None:
        self.errors = list(errors)
        self.count = 0

    def renew(self, worker: str, version: int | None = None, info: Any = None) -> Renewal:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return Renewal(version=0)


def test_an_absent_server_is_said_once_and_waited_for() -> None:
    renewals = Renewals(*(ServerUnavailable("Redis is unreachable") for _ in range(3)))
    beat, got = heartbeat(renewals, lease_s=0.15)
    beat.start()
    time.sleep(0.5)
    beat.stop()
    assert got["said"] == ["heartbeat: Redis is unreachable"]
    assert len(got["renewals"]) >= 3


def test_a_refusal_is_handed_on() -> None:
    beat, got = heartbeat(Renewals(UnknownRun("no such run")), lease_s=0.15)
    beat.start()
    time.sleep(0.3)
    assert [type(error) for error in got["failures"]] == [UnknownRun]
    beat.stop()


def test_renew_now() -> None:
    renewals = Renewals()
    beat, _ = heartbeat(renewals, lease_s=60)
    beat.start()
    time.sleep(0.1)
    beat.renew_now()
    time.sleep(0.1)
    beat.stop()
    assert renewals.count == 2
