"""The two clients of a run: :class:`Scheduler`, and :class:`AsyncScheduler` with the same calls, awaited."""

from __future__ import annotations

from roq.client.async_scheduler import AsyncScheduler
from roq.client.scheduler import Scheduler

__all__ = ["AsyncScheduler", "Scheduler"]
