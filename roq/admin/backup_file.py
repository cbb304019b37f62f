"""The file that holds a run: frames, each an 8-byte big-endian length and a msgpack body.

First a header, then parts ``{"key": "groups", "items": [...]}``, then an end with the SHA-256 of all before
it. It holds what the keys mean (fields, members, scores, stream entries), never a server's own dump format.
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
    """The first frame: the run's name, the library that wrote its keys, the step it is at, and when."""

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
    """A part that is read: what its items are depends on the key."""

    key: str
    items: msgspec.Raw


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last frame: the digest of all before it."""

    sha256: str


class Writer:
    """Writes frames one after the other, and their digest at the end."""

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
    """The digest of all frames before, and the frame's body."""
    sha = hashlib.sha256()
    size = os.fstat(file.fileno()).st_size
    while start := file.read(_LENGTH.size):
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > size - file.tell():  # before room is made for it
            raise damaged(path)
        body = file.read(length)
        if len(body) != length:
            raise damaged(path)
        yield sha.hexdigest(), body
        sha.update(start + body)


def damaged(path: Path) -> ConfigError:
    """The error for a file that is not as it was written."""
    return ConfigError(f"{path} is no whole export of a run: it broke off or was changed; take another copy")


def parts(path: Path) -> Iterator[Part]:
    """The parts of a file, in order.

    Raises:
        ConfigError: it is damaged; known only at its end, so it is read once before anything is written.
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
            if whole:  # something after its end
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
    """The part, its items such as the server takes them.

    Raises:
        MsgspecError, ValueError, LookupError: they are not.
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
    """What a file says of itself.

    Raises:
        ConfigError: it cannot be read, or is no export of a run that this version understands.
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
        raise ConfigError(f"{path} was written by a newer roq (library {header.library}); upgrade this one")
    return header


def _foreign(path: Path) -> ConfigError:
    return ConfigError(f"{path} is no export of a run; roq export writes one")
