"""The cost of a client's calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from roq.client.forks import renew_in_children

__all__ = ["Stats", "Timed"]

T = TypeVar("T")


class Stats:
    """The cost of a client's calls; waiting for signals is not counted.

    Attributes:
        calls: calls made.
        seconds: wall time that they cost the caller: the whole call for ``Scheduler``, the time on the event
            loop for ``AsyncScheduler`` (the loop is free while a reply is pending).
        under_way_s: wall time during which at least one call was waiting for its reply.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.under_way_s = 0.0
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Forget the calls that other threads of the parent wait for."""
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def count(self) -> Generator[None]:
        """Count the call made inside."""
        with self._lock:
            self.calls += 1
            self._under_way += 1
            if self._under_way == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self.under_way_s += time.perf_counter() - self._since


class Timed(Awaitable[T]):
    """A coroutine whose turns on the event loop are timed."""

    def __init__(self, work: Coroutine[Any, Any, T], stats: Stats) -> None:
        self._work = work
        self._stats = stats

    def __await__(self) -> Generator[Any, Any, T]:
        """Pass everything through; add up the time between resuming and yielding."""
        turns = self._work.__await__()
        step: Callable[[], Any] = lambda: next(turns)  # noqa: E731 - replaced at every turn
        while True:
            started = time.perf_counter()
            try:
                waiting_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self._stats.seconds += time.perf_counter() - started
            try:
                yield waiting_for
            except BaseException as error:  # noqa: BLE001 - a cancellation belongs to the coroutine
                step = partial(turns.throw, error)
            else:
                step = partial(next, turns)
