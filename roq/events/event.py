"""One transition of a run as an event, and the slots and moves that it names.

All values are text, as in the stream. Ids are milliseconds of the server's clock and a number. Two events
are the reader's own: ``archive``, the first line of an archive, with the run's configuration as JSON; and
``gap``, where the stream had been trimmed before it was read: ``missing`` events, if their number is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

__all__ = ["BEGINNING", "Event", "Move", "Place", "gap", "id_order", "parse_moves", "parse_place"]

BEGINNING = "0-0"  # the id before all events


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
