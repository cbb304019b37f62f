"""Waiting for something to become true, with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "until", "until_async"]


def eventually(find: Callable[[], Any], within: float = 15.0) -> Any:
    """What ``find`` gives as soon as it is something."""
    return until(find, "a result", within, every=0.02)


def until(
    condition: Callable[[], Any],
    what: str,
    seconds: float = 30,
    log: Callable[[], str] = str,
    every: float = 0.1,
) -> Any:
    """Wait for a condition and return its value; a failure contains ``what`` it is, and the ``log``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{log()}"
        time.sleep(every)
    return value


async def until_async(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition while the event loop runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        await asyncio.sleep(0.05)
