"""Format numbers, times, errors and untrusted text for display."""

from __future__ import annotations

import logging
import re
from datetime import datetime, tzinfo
from typing import Any

__all__ = [
    "LineFormatter",
    "clock",
    "is_file_name",
    "moment",
    "one_line",
    "printable",
    "printable_values",
    "size",
]

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def clock(seconds: float) -> str:
    """Format seconds: ``8.2 s``, ``3:07``, ``1:02:07``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_file_name(name: str) -> bool:
    """True if an untrusted name is safe as a file name: no folder, nothing hidden or unusual."""
    return _FILE_NAME.fullmatch(name) is not None


def moment(seconds: float, zone: tzinfo | None = None) -> str:
    """A time since 1970 as ``2026-11-30 18:02:11``; ``?`` if no calendar has it."""
    try:
        return f"{datetime.fromtimestamp(seconds, zone):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def one_line(error: object) -> str:
    """An exception's message on one printable line; its class name if the message is empty."""
    return printable(" ".join(str(error).split())) or type(error).__name__


# C0, DEL, C1, line and paragraph separators, bidirectional controls, lone surrogates.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape every character that a terminal or browser obeys instead of showing.

    All text from Redis, workers and users' functions passes here on its way to a terminal, a log line or a
    page: an escape sequence can rewrite a terminal, a line break forges a log line, a bidirectional control
    reorders what is read. Characters above U+007E become JSON's escapes, so JSON keeps its meaning.

    >>> print(printable("a\\x1b[31m\\nb"), printable("\\u202e"))
    a\\x1b[31m\\nb \\u202e
    """
    return _CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return short or (f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}")


def printable_values(value: Any) -> Any:
    """A JSON-like value with all text in it, keys too, made :func:`printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(k): printable_values(v) for k, v in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [printable_values(v) for v in value]  # pyright: ignore
    return value


class LineFormatter(logging.Formatter):
    """Log records as one :func:`printable` line each; a traceback keeps its line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def size(count: float) -> str:
    """Format a number of bytes, to three digits.

    >>> size(0), size(512), size(27_650), size(999_600), size(1_170_000_000)
    ('0 B', '512 B', '27.6 kB', '1 MB', '1.17 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
