"""Validation of event fields: archives are untrusted input."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite

import msgspec

from roq.protocol.events import EVENTS as DECLARED
from roq.protocol.events import Field

__all__ = ["EVENTS", "is_id", "refuse_bad_fields"]

_NUMBER = r"\d{1,16}"  # all of the library's numbers are below 2^53
_PLACE = rf"{_NUMBER}\.{_NUMBER}"
_MOVE = rf"{_NUMBER}:{_PLACE}>{_PLACE}"
_MOST_SHOWN = 60  # characters of a bad value

_ID = re.compile(r"\d{1,16}-\d{1,10}", re.ASCII)
_TIME = re.compile(r"\d{1,16}", re.ASCII)


def is_id(text: str, *, or_time: bool = False) -> bool:
    """Return whether this is an event id, ``milliseconds-number`` or, with ``or_time``, only milliseconds."""
    return _ID.fullmatch(text) is not None or (or_time and _TIME.fullmatch(text) is not None)


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


_decimal = _matches(r"-?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,4})?")
_figures = msgspec.json.Decoder(dict[str, float])


def _finite(text: str) -> bool:
    return _decimal(text) and isfinite(float(text))


def _metrics(text: str) -> bool:
    try:
        return all(map(isfinite, _figures.decode(text).values()))
    except (msgspec.DecodeError, RecursionError):
        return False


_KINDS: dict[str, tuple[Callable[[str], bool], str]] = {
    "integer": (_matches(_NUMBER), "a whole number"),
    "float": (_finite, "a finite number"),
    "place": (_matches(_PLACE), "a place such as 3.1"),
    "members": (_matches(rf"{_NUMBER}(,{_NUMBER})*"), "a list such as 1,2"),
    "groups": (_matches(rf"{_NUMBER}( {_NUMBER})*"), "a list such as 1 2"),
    "moves": (_matches(rf"({_MOVE}( {_MOVE})*)?"), "a list such as 7:3.1>2.4"),
    "metrics": (_metrics, "a JSON object of finite numbers"),
    "text": (lambda _text: True, "text"),
}
_OPTIONAL_COUNT, _TEXT = Field("integer", optional=True), Field("text", optional=False)
# Events that only archives have: the first line, and the one for trimmed events.
_OWN = {"archive": {"run": _TEXT, "config": _TEXT}, "gap": {"missing": _OPTIONAL_COUNT}}
_ANY = {  # also read from events of unknown kinds
    "group": _OPTIONAL_COUNT,
    "groups": Field("groups", optional=True),
    "moves": Field("moves", optional=True),
    "missing": _OPTIONAL_COUNT,
}
EVENTS = (*DECLARED, "gap")
"""The events that this version knows, and ``gap``, which stands for trimmed events."""


def refuse_bad_fields(fields: Mapping[str, str]) -> None:
    """Check an event's fields. An event of an unknown kind may have any others.

    Raises:
        ValueError: a field is missing or has an invalid value.
    """
    name = fields.get("event")
    if name is None:
        raise ValueError("it has no 'event'")
    known = DECLARED.get(name) or _OWN.get(name)
    for field, declared in {**_ANY, **(known or {})}.items():
        if field in fields:
            fits, what = _KINDS[declared.kind]
            if not fits(fields[field]):
                raise ValueError(f"{field} is {fields[field][:_MOST_SHOWN]!r}, not {what}")
        elif not declared.optional:
            raise ValueError(f"the event {name!r} has no {field!r}")
