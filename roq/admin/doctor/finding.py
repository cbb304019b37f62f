"""What ``roq doctor`` finds, one line each."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "fail", "ok", "warn"]


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, how it is, and in ``text`` what there is and what to do."""

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", text)


def warn(name: str, text: str) -> Finding:
    """A run works, but mind it."""
    return Finding(name, "warning", text)


def fail(name: str, text: str) -> Finding:
    """A run cannot work, or is in danger."""
    return Finding(name, "failed", text)
