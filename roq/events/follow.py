"""Read a run's events from its stream in Redis, and wait for new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from roq.events.event import BEGINNING, Event

__all__ = ["EventSource", "follow", "read_events"]

FOLLOW_S = 2.0  # how often a follower checks whether to continue


class EventSource(Protocol):
    """A source of events: a :class:`roq.Scheduler`."""

    def events(self, after: str = ..., *, known: int | None = ..., wait_s: float = ...) -> list[Event]:
        """Return a page of events after ``after``, oldest first."""
        ...


def read_events(sched: EventSource, after: str = BEGINNING) -> Iterator[Event]:
    """Yield the run's events so far, oldest first, reading a page at a time."""
    for page in _pages(sched, after, 0 if after == BEGINNING else None, lambda: False):
        yield from page


def follow(
    sched: EventSource,
    after: str = BEGINNING,
    *,
    known: int | None = None,
    going: Callable[[], bool] = lambda: True,
) -> Iterator[list[Event]]:
    """Yield the run's events so far and new ones as they arrive, page by page.

    Args:
        sched: a scheduler for this follower only, since its statistics count the waiting time.
        after: start after the event with this id.
        known: number of events up to ``after``; needed to know the size of a gap.
        going: called while waiting, every :data:`FOLLOW_S` seconds; stops when it returns False.
    """
    if known is None and after == BEGINNING:
        known = 0
    return _pages(sched, after, known, going)


def _pages(
    sched: EventSource, after: str, known: int | None, going: Callable[[], bool]
) -> Iterator[list[Event]]:
    while True:
        page = sched.events(after, known=known)
        if not page:
            if not going():
                return
            page = sched.events(after, known=known, wait_s=FOLLOW_S)
        if page:
            after = page[-1].id
            known = None if known is None else known + sum(event.count for event in page)
            yield page
