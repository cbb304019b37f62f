"""Findings about a deployment, one line each."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "fail", "ok", "warn"]


class Finding(msgspec.Struct, frozen=True):
    """One line: the thing checked, its state, and in ``text`` its value and what to do."""

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str


def ok(name: str, text: str) -> Finding:
    """A passed check."""
    return Finding(name, "ok", text)


def warn(name: str, text: str) -> Finding:
    """A run works, but something needs attention."""
    return Finding(name, "warning", text)


def fail(name: str, text: str) -> Finding:
    """A run cannot work, or is at risk."""
    return Finding(name, "failed", text)
