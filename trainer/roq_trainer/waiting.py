"""Wait for a batch, log what is missing, and give up after the job's timeouts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from roq.config import Training
from roq.errors import RunEnded, ServerUnavailable, Stalled
from roq.types import Batch, Status

__all__ = ["Order", "Waiter", "describe"]

log = logging.getLogger("roq.trainer")

POLL_S = 1.0  # one wait for a signal; taking again also drives the scheduler's stuck timeout
ORDER_S = 10.0  # the other ranks hear from rank 0 at least this often
LOOK_S = 5.0  # how often the run's status is read while waiting
LOG_S = 30.0  # how often it is logged


class Order(msgspec.Struct, frozen=True):
    """The next action of all ranks: train ``batch``, keep waiting, or leave."""

    kind: Literal["train", "wait", "end", "stop"]
    batch: Batch | None = None


class _Source(Protocol):
    def take(self, trainer: str, version: int | None = None) -> Batch | None: ...
    def status(self) -> Status: ...
    def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int: ...


class Waiter:
    """Take batches, on rank 0.

    Args:
        sched: the run's scheduler. trainer: this start of the trainer. batch_size: groups of a batch.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        sched: _Source,
        trainer: str,
        training: Training,
        batch_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sched, self._trainer, self._training = sched, trainer, training
        self._batch_size, self._clock = batch_size, clock
        self._look_s = min(LOOK_S, training.worker_timeout_s / 4, training.progress_timeout_s / 4)
        self._signal = 0
        self._error = ""
        self._restart()

    def _restart(self) -> None:
        now = self._clock()
        self._since = self._live_at = self._progress_at = now
        self._next_look, self._next_log = now + self._look_s, now + LOG_S / 3
        self._picture: object = None

    def next(self, version: int, stopping: Callable[[], bool]) -> Order:
        """The batch for the update of ``version``, or another order; returns within :data:`ORDER_S`.

        Args:
            version: number of updates in this trainer's weights. stopping: returns True to leave.

        Raises:
            Stalled: waited for longer than the job's timeouts.
        """
        deadline = self._clock() + ORDER_S
        while not stopping():
            try:
                batch = self._sched.take(self._trainer, version)
            except RunEnded:
                return Order("end")
            except ServerUnavailable:
                if stopping():  # nothing is lost between two steps
                    return Order("stop")
                raise
            if batch is not None:
                self._restart()
                return Order("train", batch)
            if self._clock() >= self._next_look:
                self._look(version)
            if self._clock() >= deadline:
                return Order("wait")
            self._signal = self._sched.wait(self._signal, min(POLL_S, self._look_s), batch=True)
        return Order("stop")

    def started(self) -> None:
        """Restart the timeouts, so that they exclude training time; call it before waiting again."""
        self._restart()

    def _look(self, version: int) -> None:
        status, now = self._sched.status(), self._clock()
        self._next_look = now + self._look_s
        self._error = next((f"{w.worker}: {w.error}" for w in status.workers if w.error), self._error)
        full = [(buffer.buffer, buffer.occupied) for buffer in status.buffers]
        picture = (status.version, status.frontier, status.ledger, full)
        if status.paused or any(worker.lease_left_s > 0 for worker in status.workers):
            self._live_at = now
        if status.paused or picture != self._picture:
            self._progress_at, self._picture = now, picture
        silent, still = now - self._live_at, now - self._progress_at
        text = f"waiting for {now - self._since:.0f} s for {describe(status, version, self._batch_size)}"
        last = f"; the last error that a worker reported: {self._error}" if self._error else ""
        if silent >= self._training.worker_timeout_s:
            raise Stalled(
                f"no live worker for {silent:.0f} s (trainer.worker_timeout_s), {text}{last}. "
                "Start workers, then start the trainer again: it resumes where it left off"
            )
        if still >= self._training.progress_timeout_s:
            raise Stalled(
                f"no progress for {still:.0f} s (trainer.progress_timeout_s), {text}{last}. "
                "Check the workers' logs; then start the trainer again: it resumes where it left off"
            )
        if now >= self._next_log:
            self._next_log = now + LOG_S
            log.info("%s%s", text, last)


def describe(status: Status, version: int, batch_size: int) -> str:
    """Describe what batch ``version`` still needs: how full it is, and who holds which slot for how long."""
    buffer = next((b for b in status.buffers if b.buffer == version), None)
    parts = [f"batch {version}"]
    if buffer is not None:
        parts[0] += (
            f": {buffer.occupied} of {batch_size} groups done, {buffer.reserved} unfinished, "
            f"{buffer.empty} slots empty ({buffer.state})"
        )
    for slot in status.waiting[:8]:
        owners = ", ".join(slot.owners) or "no worker"
        pending = f", {slot.pending} trajectories waiting to be issued" if slot.pending else ""
        where = f"slot {slot.buffer}.{slot.slot} (group {slot.group})"
        parts.append(f"{where} with {owners} for {slot.age_s:.0f} s{pending}")
    if len(status.waiting) > 8:
        parts.append(f"and {len(status.waiting) - 8} more slots")
    live = sum(worker.lease_left_s > 0 for worker in status.workers)
    parts.append(f"{live} live workers" + (", admission is paused" if status.paused else ""))
    return "; ".join(parts)
