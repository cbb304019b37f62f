"""The events of the library and their fields, read from lua/lib/events.lua."""

from __future__ import annotations

import re

import msgspec

from roq.protocol.library import lua_text

__all__ = ["EVENTS", "MEANINGS", "Field"]


class Field(msgspec.Struct, frozen=True):
    """A field of an event.

    Attributes:
        kind: integer, float, text, place (``3.1``), members (``1,2``), groups (``1 2``),
            moves (``7:3.1>2.4 …``) or metrics (a JSON object of numbers).
        optional: it may be missing.
    """

    kind: str
    optional: bool


def _declared() -> tuple[dict[str, dict[str, Field]], dict[str, str]]:
    """Event -> its fields in the order they are written; event -> its meaning."""
    source = lua_text("lib/events.lua")
    named = re.findall(r"^local (\w+) =\s*\{(.*?)\}$", source, _WHOLE)
    blocks = {name: _fields(body) for name, body in named}
    table = re.search(r"^local declared = \{\n(.*?)\n\}$", source, _WHOLE)
    assert table
    events: dict[str, dict[str, Field]] = {}
    meanings: dict[str, str] = {}
    event = r"^  -- ([^\n]+)\n  (\w+) = (?:\{(.*?)\}|(\w+)),$"
    for meaning, name, body, block in re.findall(event, table[1], _WHOLE):
        events[name] = blocks[block] if block else _fields(body)
        meanings[name] = meaning
    return events, meanings


_WHOLE = re.MULTILINE | re.DOTALL


def _fields(body: str) -> dict[str, Field]:
    found = re.findall(r'"(\w+):(\w+)(\??)"', body)
    return {name: Field(kind, bool(optional)) for name, kind, optional in found}


EVENTS, MEANINGS = _declared()
