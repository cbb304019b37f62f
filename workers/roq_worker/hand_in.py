"""Hand in finished trajectories in batches: those that finish during one call go with the next."""

from __future__ import annotations

import asyncio

from roq.client.async_scheduler import AsyncScheduler
from roq.trajectory import Trajectory
from roq.types import Completion, Reservation

__all__ = ["HandIn"]


class HandIn:
    """``complete``, with one round trip for all trajectories finished since the last one."""

    def __init__(self, scheduler: AsyncScheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[tuple[Reservation, Trajectory, asyncio.Future[Completion]]] = []
        self._flight: asyncio.Task[None] | None = None

    async def complete(self, claim: Reservation, payload: Trajectory) -> Completion:
        """As :meth:`roq.AsyncScheduler.complete`, errors included."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((claim, payload, answer))
        if self._flight is None:
            self._flight = asyncio.create_task(self._fly())
        return await answer

    async def _fly(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting, []
            try:
                pairs = [(claim, payload) for claim, payload, _ in some]
                answers = await self._scheduler.complete_many(pairs)
            except Exception as error:  # noqa: BLE001 - passed to every caller
                answers = [error] * len(some)
            for (_, _, future), answer in zip(some, answers, strict=True):
                if future.done():  # its task was cancelled
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._flight = None
