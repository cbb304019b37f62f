"""The file format of an exported run: frames, each an 8-byte big-endian length and a msgpack body.

A header comes first, then parts ``{"key": "groups", "items": [...]}``, then an end with the SHA-256 of
everything before it. Parts hold the content of keys (fields, members, scores, stream entries), never a
server's dump format.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from roq.config import RUN_NAME
from roq.errors import ConfigError
from roq.events.event import id_order
from roq.events.fields import is_id
from roq.protocol import library
from roq.protocol.keys import KINDS

__all__ = ["FORMAT", "End", "Header", "Part", "Writer", "damaged", "parts", "read_header"]

FORMAT = 1
_LENGTH = struct.Struct(">Q")
_LIBRARY = re.compile(r"\d{1,9} [0-9a-f]{12}", re.ASCII)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: the run's name, the library that wrote its keys, its step, and the time."""

    roq_export: int
    run: str
    library: str
    version: int
    at: float


class Part(msgspec.Struct, frozen=True, tag="part"):
    """Items of a key: [field, value], [member, score], values of a list, or [id, [field, value, …]]."""

    key: str
    items: list[Any]


class _Found(msgspec.Struct, frozen=True, tag="part"):
    """A part as read: the type of its items depends on the key."""

    key: str
    items: msgspec.Raw


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last frame: the digest of all frames before it."""

    sha256: str


class Writer:
    """Write frames in sequence, and their digest at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha = hashlib.sha256()
        self.bytes = 0

    def add(self, frame: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(frame)
        data = _LENGTH.pack(len(body)) + body
        self._file.write(data)
        self._sha.update(data)
        self.bytes += len(data)

    def end(self) -> None:
        self.add(End(self._sha.hexdigest()))


def _frames(file: BinaryIO, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the digest of all previous frames, and the frame's body."""
    sha = hashlib.sha256()
    size = os.fstat(file.fileno()).st_size
    while start := file.read(_LENGTH.size):
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > size - file.tell():  # checked before memory is allocated
            raise damaged(path)
        body = file.read(length)
        if len(body) != length:
            raise damaged(path)
        yield sha.hexdigest(), body
        sha.update(start + body)


def damaged(path: Path) -> ConfigError:
    """The error for a truncated or changed file."""
    return ConfigError(f"{path} is truncated or corrupt (not a complete export); use another copy")


def parts(path: Path) -> Iterator[Part]:
    """The parts of a file, in order.

    Raises:
        ConfigError: the file is damaged. Known only at its end: read all of it before writing anything.
    """
    whole = False
    with path.open("rb") as file:
        frames = _frames(file, path)
        next(frames, None)
        for digest, body in frames:
            try:
                frame = msgspec.msgpack.decode(body, type=_Found | End)
                part = None if isinstance(frame, End) else _part(frame)
            except (msgspec.MsgspecError, ValueError, LookupError, RecursionError):
                raise damaged(path) from None
            if whole:  # data after the end
                raise damaged(path)
            if isinstance(frame, End):
                whole = frame.sha256 == digest
            elif part is not None:
                yield part
    if not whole:
        raise damaged(path)


_ITEMS: dict[str, Any] = {
    "hash": list[tuple[bytes, bytes]],
    "zset": list[tuple[bytes, float]],
    "list": list[bytes],
    "stream": list[tuple[bytes, list[bytes]]],
}


def _part(found: _Found) -> Part:
    """Decode a part and check that the server can take its items.

    Raises:
        MsgspecError, ValueError, LookupError: it cannot.
    """
    kind = KINDS[found.key]
    items: list[Any] = msgspec.msgpack.decode(found.items, type=_ITEMS[kind])
    fits = bool(items)
    if kind == "zset":
        fits = fits and all(isfinite(score) for _, score in items)
    elif kind == "stream":
        ids = [id_order(entry.decode()) for entry, _ in items if is_id(entry.decode())]
        fits = fits and len(ids) == len(items) and ids[0] > (0, 0) and all(a < b for a, b in pairwise(ids))
        fits = fits and all(fields and len(fields) % 2 == 0 for _, fields in items)
    if not fits:
        raise ValueError
    return Part(found.key, items)


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        ConfigError: the file cannot be read, is not an export, or comes from a newer version.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            header = msgspec.msgpack.decode(file.read(min(length, 4096)), type=Header)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError):
        raise _foreign(path) from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if not (_LIBRARY.fullmatch(header.library) and RUN_NAME.fullmatch(header.run)):
        raise _foreign(path)
    if header.roq_export > FORMAT or library.older_than_ours(header.library) is False:
        raise ConfigError(
            f"{path} was written by a newer roq (library {header.library}); upgrade this installation"
        )
    return header


def _foreign(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not an export of a run; create one with roq export")
