"""The inputs of the rollout loop: OS signals, the heartbeat's answers and finished tasks."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from roq.types import Renewal

__all__ = ["Inbox", "Stopped"]

T = TypeVar("T")


class Stopped(Exception):
    """SIGTERM arrived before a call had its result."""


class Inbox:
    """Wakes the running event loop; only ``renewed`` and ``failed`` may be called from other threads.

    Attributes:
        stop: SIGTERM or SIGINT arrived.
        changed: something happened that the loop must handle.
        renewals: the heartbeat's answers that the loop has not read, oldest first.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.changed = asyncio.Event()
        self.renewals: deque[Renewal] = deque()
        self._failures: deque[BaseException] = deque()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self.stop.set()
        self.changed.set()

    def renewed(self, renewal: Renewal) -> None:
        """Queue an answer of the heartbeat."""
        self.renewals.append(renewal)
        self._wake()

    def failed(self, error: BaseException) -> None:
        """Queue a failure that ends the worker."""
        self._failures.append(error)
        self._wake()

    def ended(self, task: asyncio.Task[Any]) -> None:
        """Wake the loop for a finished task, and queue its failure; add this as the task's callback."""
        if not task.cancelled() and (error := task.exception()):
            self._failures.append(error)
        self.changed.set()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.changed.set)

    def raise_failure(self) -> None:
        """Raise the oldest queued failure, if any."""
        if self._failures:
            raise self._failures.popleft()

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``.

        Raises:
            Stopped: SIGTERM arrived first.
        """
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        raise Stopped
