"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "until"]


def eventually(find: Callable[[], Any], within: float = 15.0) -> Any:
    """Call ``find`` until it returns a true value, and return that."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if found := find():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {within} s")


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Wait for a condition; the failure names it by ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)
