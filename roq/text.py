"""Format numbers and errors for display."""

from __future__ import annotations

import re

__all__ = ["clock", "is_file_name", "one_line", "size"]

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


def one_line(error: object) -> str:
    """An exception's message on one line; its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


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
