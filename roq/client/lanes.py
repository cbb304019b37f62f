"""Request identities: a client's calls in flight, numbered so that a retry has one effect."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager

from roq.client.forks import renew_in_children

__all__ = ["LANES", "Lanes"]

LANES = 64  # single calls in flight; a batch of calls takes as many again (see LANES in lua/lib/replies.lua)


class Lane:
    """One call at a time: its number and the number of its current call."""

    __slots__ = ("number", "sequence")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0


class Lanes:
    """A client's lanes (lua/lib/replies.lua). A lane is held for one call, retries included."""

    def __init__(self) -> None:
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Begin: a fork is another client."""
        self._lock = threading.Lock()
        self.client = uuid.uuid4().hex
        self._free: list[Lane] = []
        self._made = 0

    @contextmanager
    def hold(self, calls: int = 1) -> Generator[list[str]]:
        """Identities of new calls. The caller keeps at most ``LANES`` single calls and a batch in flight."""
        with self._lock:
            lanes = [self._free.pop() for _ in range(min(calls, len(self._free)))]
            while len(lanes) < calls:
                self._made += 1
                lanes.append(Lane(self._made))
        for lane in lanes:
            lane.sequence += 1
        try:
            yield [f"{self.client} {lane.number} {lane.sequence}" for lane in lanes]
        finally:
            with self._lock:
                self._free += lanes
