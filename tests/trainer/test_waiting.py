"""The trainer while no batch is ready; the clock is set by hand."""

from __future__ import annotations

import logging

import pytest
from trainer_support import make_batch

from roq.config import Training
from roq.errors import RunEnded, ServerUnavailable, Stalled
from roq.types import Batch, BufferStatus, Ledger, Status, WaitingSlot, WorkerStatus
from roq_trainer import waiting
from roq_trainer.waiting import Order, Waiter, describe

LIVE = WorkerStatus(worker="w0", lease_left_s=20.0)
BUFFER = BufferStatus(buffer=3, occupied=5, reserved=2, empty=1, state="PENDING")
SLOT = WaitingSlot(buffer=3, slot=7, group=41, ordinal=40, age_s=12.4, owners=["w0", "w1"], pending=1)


class Script:
    """A scheduler whose status and batches are given; waiting takes a second of its clock."""

    def __init__(self, **status: object) -> None:
        self.now = 0.0
        self.given: Batch | None = None
        self.ended = False
        self.picture = Status(buffers=[BUFFER], waiting=[SLOT], workers=[LIVE], version=3, frontier=3)
        self.change(**status)

    def change(self, **status: object) -> None:
        import msgspec

        self.picture = msgspec.structs.replace(self.picture, **status)

    def take(self, trainer: str, version: int | None = None) -> Batch | None:
        assert (trainer, version) == ("t0", 3)
        if self.ended:
            raise RunEnded("over")
        return self.given

    def status(self) -> Status:
        return self.picture

    def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        self.now += timeout_s
        return signal

    def waiter(self, **training: float) -> Waiter:
        return Waiter(self, "t0", Training(**training), 8, clock=lambda: self.now)


def never() -> bool:
    return False


def wait_until(waiter: Waiter, script: Script, seconds: float) -> None:
    while script.now < seconds:
        assert waiter.next(3, never) == Order("wait")


def test_hands_over_the_batch_or_the_end_or_the_stop() -> None:
    script = Script()
    waiter = script.waiter()
    assert waiter.next(3, never) == Order("wait")
    assert waiting.ORDER_S <= script.now <= waiting.ORDER_S + 1
    script.given = make_batch()[0]
    assert waiter.next(3, never) == Order("train", script.given)
    assert waiter.next(3, lambda: True) == Order("stop")
    script.ended = True
    assert waiter.next(3, never) == Order("end")


def test_describes_slots_owners_and_ages() -> None:
    assert describe(Script().picture, 3, 8) == (
        "batch 3: 5 of 8 groups done, 2 unfinished, 1 slots empty (PENDING); "
        "slot 3.7 (group 41) with w0, w1 for 12 s, 1 trajectories waiting to be issued; 1 live workers"
    )


def test_logs_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    with caplog.at_level(logging.INFO, "roq.trainer"):
        wait_until(script.waiter(), script, 60)
    assert 2 <= len(caplog.messages) <= 3
    assert "slot 3.7 (group 41) with w0, w1" in caplog.messages[0]


def test_gives_up_without_a_live_worker_and_tells_the_last_error() -> None:
    broken = WorkerStatus(worker="w0", lease_left_s=5.0, error="CUDA out of memory")
    script = Script(workers=[broken])
    waiter = script.waiter(worker_timeout_s=60.0)
    wait_until(waiter, script, 100)
    script.change(workers=[])
    with pytest.raises(Stalled, match=r"6. s.*w0.*CUDA out of memory"):
        wait_until(waiter, script, 300)
    assert 155 <= script.now <= 175


def test_gives_up_without_progress_but_progress_counts() -> None:
    script = Script()
    waiter = script.waiter(progress_timeout_s=100.0)
    for issued in range(5):
        script.change(ledger=Ledger(issued=issued))
        wait_until(waiter, script, script.now + 80)
    with pytest.raises(Stalled, match=r"10. s.*3\.7"):
        wait_until(waiter, script, script.now + 200)


def test_a_paused_run_waits_for_ever() -> None:
    script = Script(paused=True, workers=[])
    wait_until(script.waiter(worker_timeout_s=10.0, progress_timeout_s=10.0), script, 1000)


def test_training_time_is_not_waiting_time() -> None:
    script = Script()
    waiter = script.waiter(progress_timeout_s=100.0)
    script.given = make_batch()[0]
    waiter.next(3, never)
    script.given, script.now = None, 5000.0
    waiter.started()
    wait_until(waiter, script, 5050)


def test_asked_to_leave_while_the_server_is_away() -> None:
    class Away(Script):
        def take(self, trainer: str, version: int | None = None) -> Batch | None:
            raise ServerUnavailable("away")

    asked = iter([False, True])
    assert Away().waiter().next(3, lambda: next(asked)) == Order("stop")
    with pytest.raises(ServerUnavailable):
        Away().waiter().next(3, never)
