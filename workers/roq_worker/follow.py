"""Load the newest published weights while requests are in flight."""

from __future__ import annotations

import asyncio
import itertools

from roq.errors import StoreFailed, UnknownWeights, WeightsError
from roq_worker.engine import Swapped
from roq_worker.setup import Worker

__all__ = ["Follow"]

RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # then every 30 s


class Follow:
    """Keep a worker's engine at the newest weights version.

    Attributes:
        newest: the newest version that the worker has heard of.
        trouble: why it cannot be loaded; shown in status.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._task: asyncio.Task[None] | None = None
        self._how = "read"
        self.newest = worker.engine.version
        self.trouble = ""

    @property
    def behind(self) -> bool:
        """True if newer weights than the engine's are published."""
        return self.newest > self._worker.engine.version

    @property
    def loading(self) -> bool:
        """True while weights are being loaded or a retry is pending."""
        return self._task is not None and not self._task.done()

    def heard_of(self, version: int) -> bool:
        """Note a published version; returns True if it is new."""
        news, self.newest = version > self.newest, max(self.newest, version)
        return news

    def take_turn(self, *, may_start: bool) -> bool:
        """Start loading the newest weights if the engine is behind; returns True if a load has just ended."""
        ended = self._task is not None and self._task.done()
        if ended:
            self._task = None
        if may_start and self.behind and self._task is None:
            self._task = asyncio.create_task(self._follow())
            self._task.add_done_callback(self._worker.inbox.ended)
        return ended

    def close(self) -> None:
        """Cancel a load in progress."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        """Load the newest weights, with retries; generation continues with the old ones."""
        worker = self._worker
        for attempt in itertools.count():
            try:
                await self._load()
                self.trouble = ""
                version = worker.engine.version
                worker.beat.info = worker.beat.info | {"doing": "generating", "version": version}
                worker.beat.renew_now()  # ends the pin on the old version
                return
            except (WeightsError, StoreFailed, UnknownWeights) as error:
                self.trouble = str(error)[:2000]  # every heartbeat carries it
                pause = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                worker.say(f"keeping weights v{worker.engine.version}, retrying in {pause:g} s: {error}")
                await asyncio.sleep(pause)

    async def _load(self) -> None:
        worker = self._worker
        newest = await worker.scheduler.pin(worker.name)
        if newest.version <= worker.engine.version:
            return
        swapped = await worker.engine.swap(newest.location, newest.version, newest.sender)
        worker.counters.swaps += 1
        worker.counters.swap_s += swapped.seconds
        worker.counters.received += swapped.how == "received"
        self._report(newest.version, newest.location, swapped)

    def _report(self, version: int, location: str, swapped: Swapped) -> None:
        """Report how the weights were loaded, if that changed or was not as expected."""
        if swapped.trouble or swapped.how != self._how:
            origin = "" if swapped.how == "received" else f" from {location}"
            why = f": {swapped.trouble}" if swapped.trouble else ""
            self._worker.say(f"weights v{version} {swapped.how}{origin}{why}")
        self._how = swapped.how
