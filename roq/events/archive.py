"""An archive: all events of a run in a file. The stream in Redis keeps only the newest ``event_log`` events.

One JSON object per line, in stream order, with the event's id first::

    {"id":"0-0","event":"archive","run":"demo","config":"{…}"}
    {"id":"1796023304207-0","event":"created"}
    {"id":"1796023304311-0","event":"reserve","group":"1","ordinal":"0","at":"1.4",…}
"""

from __future__ import annotations

import fcntl
import gzip
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import msgspec

from roq.config import RunConfig
from roq.errors import ConfigError, RoqError
from roq.events.event import BEGINNING, Event, id_order
from roq.events.fields import is_id, refuse_bad_fields

__all__ = ["Archive", "archived_config", "read_archive"]

LONGEST = 16 << 20  # bytes in a line


def read_archive(path: str | Path) -> Iterator[Event]:
    """Read the events of an archive, plain or ``.gz``, skipping a last line that a crash truncated.

    The events are checked for form: ids increase, and every field has a valid value.

    Raises:
        ConfigError: the file cannot be read, or a line is not a valid event; names the line and the reason.
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
                    raise ConfigError(f"{path}, line {number}: {error}; the archive is damaged") from None
                before = event.id
                yield event
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None


def _checked(event: Event, before: str) -> Event:
    if not is_id(event.id):
        raise ValueError(f"invalid event id {event.id[:60]!r}; expected one such as 1796023304207-0")
    own = event.name in ("archive", "gap")  # these have the id of the event they follow
    if id_order(event.id) < id_order(before) or (event.id == before and not own):
        raise ValueError(f"id {event.id} is not greater than the previous id {before}")
    refuse_bad_fields(event.fields)
    if event.name == "archive":
        archived_config([event])
    return event


def archived_config(events: Iterable[Event]) -> RunConfig | None:
    """Return the configuration in an archive's first line; None if the archive does not start with one."""
    first = next(iter(events), None)
    if first is None or first.name != "archive":
        return None
    try:
        return msgspec.json.decode(first.get("config"), type=RunConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"invalid configuration in the archive's first line: {error}") from None


class Archive:
    """An archive open for writing, by one process at a time. :meth:`append` returns once events are on disk.

    Reopening an archive continues after its last complete line.

    Args:
        path: the file; created if missing.
        run: the run's name. config: its configuration, for the first line.

    Attributes:
        last: id of its newest event.
        known: number of the run's events it accounts for, including those in gaps.
        missing: number of events lost in gaps.

    Raises:
        ConfigError: the file is not an archive, belongs to another run, or cannot be written.
        RoqError: another process is writing it.
    """

    def __init__(self, path: str | Path, run: str, config: RunConfig) -> None:
        self.path = Path(path)
        self.last, self.known, self.missing = BEGINNING, 0, 0
        if self.path.suffix == ".gz":
            raise ConfigError(f"cannot append to {path}: write plain text and compress it later")
        try:
            self._file = self.path.open("a+b")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ConfigError(f"{path} is not a regular file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RoqError(f"another process is already writing {path}") from None
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
            raise ConfigError(f"{self.path} is not an archive of run {run}; use another file")
        if head is not None and archived_config([head]) != config:
            raise ConfigError(
                f"{self.path} is from an earlier run {run} with a different configuration; use another file"
            )
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
            RoqError: the run was recreated since the archive began; its events belong in another file.
            ConfigError: the file cannot be written, most likely because the disk is full.
        """
        events = list(events)
        if any(event.name == "created" for event in events) and self.known:
            raise RoqError(f"the run was recreated after {self.path} was started; use another file")
        data = memoryview(b"".join(event.line() for event in events))
        try:
            while data:  # unbuffered: a full buffer would fail again at close
                data = data[os.write(self._file.fileno(), data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; free some space and restart: "
                "it continues after the last complete line"
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
