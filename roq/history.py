"""A run's history: every transition as an event, from the run's stream in Redis or from an archive of it.

The stream is bounded (``event_log``); an archive is not. It is a file with one JSON object a line, in the
order of the stream, the event's id first::

    {"id":"0-0","event":"archive","run":"demo","config":"{…}"}
    {"id":"1796023304207-0","event":"created"}
    {"id":"1796023304311-0","event":"reserve","group":"1","ordinal":"0","at":"1.4",…}

All values are text, as in the stream. Ids are milliseconds of the server's clock and a number. Two events
are this file's own: ``archive``, the first line, with the run's configuration as JSON; and ``gap``, where
the stream had been trimmed before it was read: ``missing`` events, if their number is known.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self, cast

import msgspec

from roq._event_fields import is_id, refuse_bad_fields
from roq.config import RunConfig
from roq.errors import ConfigError, RoqError

if TYPE_CHECKING:
    from roq.client import Scheduler

__all__ = [
    "BEGINNING",
    "Archive",
    "Event",
    "Move",
    "Place",
    "archived_config",
    "follow",
    "gap",
    "id_order",
    "parse_moves",
    "parse_place",
    "read_archive",
    "read_events",
]

BEGINNING = "0-0"  # the id before all events
LONGEST = 16 << 20  # bytes of an archive's line
FOLLOW_S = 2.0  # a follower looks this often whether it should go on


class Place(NamedTuple):
    """A slot of a buffer; slots count from 1."""

    buffer: int
    slot: int

    def __str__(self) -> str:
        return f"{self.buffer}.{self.slot}"


class Move(NamedTuple):
    """A group that changed its slot as part of a transition."""

    group: int
    source: Place
    target: Place


def parse_place(text: str) -> Place:
    """The place that is written ``buffer.slot``.

    >>> parse_place("3.12")
    Place(buffer=3, slot=12)
    """
    buffer, _, slot = text.partition(".")
    return Place(int(buffer), int(slot))


def parse_moves(text: str) -> list[Move]:
    """The moves that are written ``group:from>to``, in order.

    >>> parse_moves("7:3.1>2.4")
    [Move(group=7, source=Place(buffer=3, slot=1), target=Place(buffer=2, slot=4))]
    """
    found: list[Move] = []
    for move in text.split():
        group, _, path = move.partition(":")
        source, _, target = path.partition(">")
        found.append(Move(int(group), parse_place(source), parse_place(target)))
    return found


class Event(msgspec.Struct, frozen=True):
    """One transition.

    Attributes:
        id: ``milliseconds-number``; rises.
        fields: what the library wrote, as text; ``event`` is its name.
    """

    id: str
    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """What happened: ``reserve``, ``occupy``, …"""
        return self.fields["event"]

    @property
    def time(self) -> float:
        """When, in seconds since 1970 on the server's clock."""
        return int(self.id.partition("-")[0]) / 1000

    def get(self, field: str, default: str = "") -> str:
        """A field, or ``default`` when the event has none of this name."""
        return self.fields.get(field, default)

    def number(self, field: str, default: int = 0) -> int:
        """A field that holds a whole number."""
        return int(self.fields.get(field) or default)

    @property
    def count(self) -> int:
        """How many events of the stream it stands for: 1, but for this file's own two kinds."""
        if self.name == "archive":
            return 0
        return self.number("missing") if self.name == "gap" else 1

    @property
    def moves(self) -> list[Move]:
        """The groups that changed their slots, in order."""
        return parse_moves(self.get("moves"))

    @property
    def metrics(self) -> dict[str, float]:
        """The trainer's figures of the step (``publish``); empty when there are none."""
        text = self.get("metrics")
        return msgspec.json.decode(text, type=dict[str, float]) if text else {}

    def line(self) -> bytes:
        """The event as a line of an archive."""
        return msgspec.json.encode({"id": self.id, **self.fields}) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Event:
        """The inverse of :meth:`line`.

        Raises:
            ValueError: it is not an event.
        """
        fields = msgspec.json.decode(line, type=dict[str, str])
        if "event" not in fields or "id" not in fields:
            raise ValueError("an event has an id and the name of what happened in 'event'")
        return cls(fields.pop("id"), fields)


def id_order(id: str) -> tuple[int, int]:  # noqa: A002
    """What ids are ordered by.

    >>> id_order("1796023304207-3") < id_order("1796023304207-12")
    True
    """
    time, _, number = id.partition("-")
    return int(time), int(number or 0)


def gap(after: str, missing: int | None) -> Event:
    """What stands for events that were trimmed before they could be read."""
    return Event(after, {"event": "gap"} if missing is None else {"event": "gap", "missing": str(missing)})


# ---- from Redis ----------------------------------------------------------------------------------


def read_events(sched: Scheduler, after: str = BEGINNING) -> Iterator[Event]:
    """The events of a run so far, oldest first, read a page at a time."""
    for page in _pages(sched, after, 0 if after == BEGINNING else None, lambda: False):
        yield from page


def follow(
    sched: Scheduler,
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
    sched: Scheduler, after: str, known: int | None, going: Callable[[], bool]
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


# ---- archives ------------------------------------------------------------------------------------


def read_archive(path: str | Path) -> Iterator[Event]:
    """The events of an archive, plain or ``.gz``. A last line that a crash cut short is passed over.

    What it yields can be believed as far as its form goes: ids rise, every field holds what it can.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no event; says which, and why.
    """
    path, before = Path(path), BEGINNING
    try:
        with cast("BinaryIO", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), start=1):
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    return
                try:
                    event = _checked(Event.parse(line), before)
                except (msgspec.DecodeError, ValueError, ConfigError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}; this is no whole archive") from None
                before = event.id
                yield event
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None


def _checked(event: Event, before: str) -> Event:
    if not is_id(event.id):
        raise ValueError(f"{event.id[:60]!r} is no id of an event, such as 1796023304207-0")
    own = event.name in ("archive", "gap")  # these have the id of what they follow
    if id_order(event.id) < id_order(before) or (event.id == before and not own):
        raise ValueError(f"the id {event.id} does not rise above {before}, the one before it")
    refuse_bad_fields(event.fields)
    if event.name == "archive":
        archived_config([event])
    return event


def archived_config(events: Iterable[Event]) -> RunConfig | None:
    """The configuration in an archive's first line; None when it does not begin with one."""
    first = next(iter(events), None)
    if first is None or first.name != "archive":
        return None
    try:
        return msgspec.json.decode(first.get("config"), type=RunConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"the archive's first line holds no configuration that can be: {error}") from None


class Archive:
    """An archive that is written; one process at a time. What :meth:`append` returned from is on disk.

    Opening it again goes on after its last whole line.

    Args:
        path: the file; made when it is not there.
        run: the run's name. config: its configuration, for the first line.

    Attributes:
        last: id of the newest event in it.
        known: how many events of the run it accounts for, those of its gaps included.
        missing: events that are in none of its lines.

    Raises:
        ConfigError: the file is something else, is another run's, or cannot be written.
        RoqError: another process writes it.
    """

    def __init__(self, path: str | Path, run: str, config: RunConfig) -> None:
        self.path = Path(path)
        self.last, self.known, self.missing = BEGINNING, 0, 0
        if self.path.suffix == ".gz":
            raise ConfigError(f"{path}: an archive grows as plain text; compress it when the run is over")
        try:
            self._file = self.path.open("a+b")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ConfigError(f"{path} is no regular file, which an archive must be")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RoqError(f"another process writes {path}; one is enough") from None
        try:
            self._resume(run, config)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, run: str, config: RunConfig) -> None:
        head: Event | None = None
        for event in read_archive(self.path):
            head = head or event
            self._note(event)
        if head is not None and (head.name != "archive" or head.get("run") != run):
            raise ConfigError(f"{self.path} is not an archive of run {run}; give another file")
        if head is not None and archived_config([head]) != config:
            raise ConfigError(f"{self.path} is of an earlier run {run}, with another configuration")
        self._file.seek(0)
        whole = sum(len(line) for line in self._file if line.endswith(b"\n"))
        self._file.truncate(whole)
        if head is None:
            text = msgspec.json.encode(config).decode()
            self.append([Event(BEGINNING, {"event": "archive", "run": run, "config": text})])

    def _note(self, event: Event) -> None:
        self.last = event.id
        self.known += event.count
        self.missing += event.number("missing")

    def append(self, events: Iterable[Event]) -> None:
        """Write events and wait until they are on disk.

        Raises:
            RoqError: the run was made anew since; its events belong into another file.
            ConfigError: the file cannot be written, most likely because its disk is full.
        """
        events = list(events)
        if any(event.name == "created" for event in events) and self.known:
            raise RoqError(f"the run was created anew since {self.path} was begun; give another file")
        data = memoryview(b"".join(event.line() for event in events))
        try:
            while data:  # not through the file's buffer, which would fail once more when it is closed
                data = data[os.write(self._file.fileno(), data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; make room and start again: "
                "it goes on after its last whole line"
            ) from None
        for event in events:
            self._note(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
