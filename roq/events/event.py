"""The event that a transition writes, with the slots and moves it names.

All values are text, as in the stream. An id is the server's time in milliseconds and a sequence number. Two
events are added by readers: ``archive``, the first line of an archive, with the run's configuration as JSON;
and ``gap``, where the stream was trimmed before it was read: ``missing`` events, if the number is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

__all__ = ["BEGINNING", "Event", "Move", "Place", "gap", "id_order", "parse_moves", "parse_place"]

BEGINNING = "0-0"  # the id before all events


class Place(NamedTuple):
    """A slot of a buffer, numbered from 1."""

    buffer: int
    slot: int

    def __str__(self) -> str:
        return f"{self.buffer}.{self.slot}"


class Move(NamedTuple):
    """A group's change of slot during a transition."""

    group: int
    source: Place
    target: Place


def parse_place(text: str) -> Place:
    """Parse a place written as ``buffer.slot``.

    >>> parse_place("3.12")
    Place(buffer=3, slot=12)
    """
    buffer, _, slot = text.partition(".")
    return Place(int(buffer), int(slot))


def parse_moves(text: str) -> list[Move]:
    """Parse moves written as ``group:from>to``, in order.

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
        id: ``milliseconds-number``; increasing.
        fields: the fields that the library wrote, as text; ``event`` is the name.
    """

    id: str
    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """The kind of event: ``reserve``, ``occupy``, …"""
        return self.fields["event"]

    @property
    def time(self) -> float:
        """The server's time, in seconds since 1970."""
        return int(self.id.partition("-")[0]) / 1000

    def get(self, field: str, default: str = "") -> str:
        """Return a field, or ``default`` if the event does not have it."""
        return self.fields.get(field, default)

    def number(self, field: str, default: int = 0) -> int:
        """Return a field as an integer."""
        return int(self.fields.get(field) or default)

    @property
    def count(self) -> int:
        """The number of stream events it represents: 0 for ``archive``, ``missing`` for ``gap``, else 1."""
        if self.name == "archive":
            return 0
        return self.number("missing") if self.name == "gap" else 1

    @property
    def moves(self) -> list[Move]:
        """The groups that changed slots, in order."""
        return parse_moves(self.get("moves"))

    @property
    def metrics(self) -> dict[str, float]:
        """The trainer's metrics of the step (``publish``); empty if there are none."""
        text = self.get("metrics")
        return msgspec.json.decode(text, type=dict[str, float]) if text else {}

    def line(self) -> bytes:
        """Encode the event as a line of an archive."""
        return msgspec.json.encode({"id": self.id, **self.fields}) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Event:
        """Decode a :meth:`line`.

        Raises:
            ValueError: the line is not an event.
        """
        fields = msgspec.json.decode(line, type=dict[str, str])
        if "event" not in fields or "id" not in fields:
            raise ValueError("an event needs an 'id' and an 'event'")
        return cls(fields.pop("id"), fields)


def id_order(id: str) -> tuple[int, int]:  # noqa: A002
    """Return the sort key of an id.

    >>> id_order("1796023304207-3") < id_order("1796023304207-12")
    True
    """
    time, _, number = id.partition("-")
    return int(time), int(number or 0)


def gap(after: str, missing: int | None) -> Event:
    """Return an event that stands for events trimmed before they were read."""
    return Event(after, {"event": "gap"} if missing is None else {"event": "gap", "missing": str(missing)})
