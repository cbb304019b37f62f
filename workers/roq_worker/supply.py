"""Reserve claims: only as many as the engine has capacity for, because a waiting claim grows stale."""

from __future__ import annotations

import asyncio
import time

from roq.types import Grant, RefusalReason
from roq_worker.setup import Worker

__all__ = ["Supply"]

GAP_S = 0.02  # capacity freed within this time is reserved in one call
REFUSED_WAIT_S = 5.0  # a refused worker asks again after this time, even without a signal
LONGEST_SLEEP_S = 1.0


class Supply:
    """Decide when to reserve, and keep the last answer.

    Attributes:
        refused: why the scheduler granted less than asked; None when it may be asked again.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._watch: asyncio.Task[int] | None = None  # sleeps until the scheduler signals a change
        self._ask_at = 0.0
        self.refused: RefusalReason | None = None

    async def ask(self, free: int) -> Grant | None:
        """Reserve ``free`` claims; None when it is too early, or nothing has changed since a refusal.

        Raises:
            Stopped: SIGTERM arrived first.
        """
        worker = self._worker
        if self._watch is not None and (self._watch.done() or self.refused is None):
            if not self._watch.cancel():
                self._watch.result()
            self._watch = self.refused = None
        if not free or self.refused is not None or time.monotonic() < self._ask_at:
            return None
        asked_at = time.monotonic()
        call = worker.scheduler.reserve(worker.name, worker.engine.version, free)
        grant = await worker.inbox.unless_stopped(call)
        self._ask_at = time.monotonic() + GAP_S
        worker.counters.reserve_wait_s += time.monotonic() - asked_at
        self.refused = grant.refused
        if grant.refused is not None:
            self._watch = asyncio.create_task(worker.scheduler.wait(grant.signal, REFUSED_WAIT_S))
            self._watch.add_done_callback(lambda _: worker.inbox.changed.set())
        return grant

    def sleep_s(self, free: int) -> float:
        """The longest that the loop may sleep, with ``free`` capacity left."""
        if free and self.refused is None:
            return max(0.0, self._ask_at - time.monotonic())
        return LONGEST_SLEEP_S

    def close(self) -> None:
        """Stop waiting for a signal."""
        if self._watch is not None:
            self._watch.cancel()
