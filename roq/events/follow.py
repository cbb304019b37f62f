"""A run's events from its stream in Redis: those so far, and those to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from roq.events.event import BEGINNING, Event

__all__ = ["EventSource", "follow", "read_events"]

FOLLOW_S = 2.0  # a follower looks this often whether it should go on


class EventSource(Protocol):
    """What events are read from: a :class:`roq.Scheduler`."""

    def events(self, after: str = ..., *, known: int | None = ..., wait_s: float = ...) -> list[Event]:
        """A page of events after ``after``, oldest first."""
        ...


def read_events(sched: EventSource, after: str = BEGINNING) -> Iterator[Event]:
    """The events of a run so far, oldest first, read a page at a time."""
    for page in _pages(sched, after, 0 if after == BEGINNING else None, lambda: False):
        yield from page


def follow(
    sched: EventSource,
    after: str = BEGINNING,
    *,
    known: int | None = None,
    going: Callable[[], bool] = lambda: True,
) -> Iterator[list[Event]]:
    """The events of a run so far and those to come, page by page; sleeps while there are none.

    Args:
        sched: the run's scheduler; of its own, since its statistics count the sleep.
        after: begin after the event of this id.
        known: how many events the run has had up to ``after``; with it, a gap tells its size.
        going: asked every :data:`FOLLOW_S` seconds, and after every page.
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
