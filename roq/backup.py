"""A run as one file, and back: ``roq export`` and ``roq import``, between servers of any kind and version.

The file is a sequence of frames, each an 8-byte big-endian length and a msgpack body: a header, then parts
``{"key": "groups", "items": [...]}``, then an end with the SHA-256 of all before it. It holds what the keys
mean (fields, members, scores, stream entries), never a server's own dump format.

Consistent without stopping the run: one transaction reads everything but the trajectories and the events. A
trajectory never changes once it is there, and events are only appended, so these two are read afterwards, in
portions, up to the moment of the transaction. Should a trajectory have left meanwhile, all is read again.

Restoring writes beside the run's keys and renames them into place in one transaction: it is all there, or
nothing is.
"""

# redis-py leaves the cluster's types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from redis import exceptions
from redis.cluster import RedisCluster

from roq import _library
from roq._connect import companions, connect
from roq._event_fields import is_id
from roq._importable import why_not
from roq._keys import KINDS, keys_of
from roq._session import FAILURES, translate
from roq.acl import KEEPERS
from roq.client import Scheduler
from roq.config import RUN_NAME
from roq.errors import ConfigError, ConfigMismatch, RoqError, UnknownRun, UnsuitableServer
from roq.history import id_order

__all__ = ["Backup", "Header", "export_run", "import_run", "read_header"]

FORMAT = 1
_LENGTH = struct.Struct(">Q")
_LIBRARY = re.compile(r"\d{1,9} [0-9a-f]{12}", re.ASCII)
_PORTION = 16  # trajectories in one command: each may have max_trajectory_bytes
_PAGE = 1000  # events, and fields of other keys, in one command
_TRIES = 5
_APART = ("payloads", "events")  # read after the transaction
_TIMEOUT_S = 60.0  # one command of a backup may move much


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: the run's name, the library that wrote its keys, the step it is at, and when."""

    roq_export: int
    run: str
    library: str
    version: int
    at: float


class _Part(msgspec.Struct, frozen=True, tag="part"):
    """Items of a key: [field, value], [member, score], values of a list, or [id, [field, value, …]]."""

    key: str
    items: list[Any]


class _Found(msgspec.Struct, frozen=True, tag="part"):
    """A part that is read: what its items are depends on the key."""

    key: str
    items: msgspec.Raw


class _End(msgspec.Struct, frozen=True, tag="end"):
    sha256: str


class Backup(msgspec.Struct, frozen=True):
    """What was exported or imported."""

    run: str
    version: int
    trajectories: int
    events: int
    bytes: int


# ---- frames --------------------------------------------------------------------------------------


class _Writer:
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
        self.add(_End(self._sha.hexdigest()))


def _frames(file: BinaryIO, path: Path) -> Iterator[tuple[str, bytes]]:
    """The digest of all frames before, and the frame's body."""
    sha = hashlib.sha256()
    size = os.fstat(file.fileno()).st_size
    while start := file.read(_LENGTH.size):
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > size - file.tell():  # before room is made for it
            raise _damaged(path)
        body = file.read(length)
        if len(body) != length:
            raise _damaged(path)
        yield sha.hexdigest(), body
        sha.update(start + body)


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"{path} is no whole export of a run: it broke off or was changed; take another copy")


def _parts(path: Path) -> Iterator[_Part]:
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
                frame = msgspec.msgpack.decode(body, type=_Found | _End)
                part = None if isinstance(frame, _End) else _part(frame)
            except (msgspec.MsgspecError, ValueError, LookupError, RecursionError):
                raise _damaged(path) from None
            if whole:  # something after its end
                raise _damaged(path)
            if isinstance(frame, _End):
                whole = frame.sha256 == digest
            elif part is not None:
                yield part
    if not whole:
        raise _damaged(path)


_ITEMS: dict[str, Any] = {
    "hash": list[tuple[bytes, bytes]],
    "zset": list[tuple[bytes, float]],
    "list": list[bytes],
    "stream": list[tuple[bytes, list[bytes]]],
}


def _part(found: _Found) -> _Part:
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
    return _Part(found.key, items)


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
    if header.roq_export > FORMAT or _library.older_than_ours(header.library) is False:
        raise ConfigError(f"{path} was written by a newer roq (library {header.library}); upgrade this one")
    return header


def _foreign(path: Path) -> ConfigError:
    return ConfigError(f"{path} is no export of a run; roq export writes one")


# ---- export --------------------------------------------------------------------------------------


@contextmanager
def _node(url: str, key: str) -> Generator[Any]:
    """A client of the server that holds the run; in a cluster all its keys are on one."""
    client = connect(url, socket_timeout=_TIMEOUT_S)
    try:
        if isinstance(client, RedisCluster):
            holder = client.get_node_from_key(key)
            assert holder is not None
            yield client.get_redis_connection(holder)
        else:
            yield client
    except FAILURES as error:
        raise translate(error, url, KEEPERS) from error
    finally:
        for one in (client, *companions(client)):
            one.close()


_READ: dict[str, tuple[str | int, ...]] = {
    "hash": ("HGETALL",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "list": ("LRANGE", 0, -1),
    "stream": ("XRANGE", "-", "+"),
}


def _items(kind: str, answer: Any) -> list[Any]:
    """A key's content as redis-py gives it, as items."""
    if kind == "hash":
        return [list(pair) for pair in answer.items()]
    if kind == "zset":
        return [[member, float(score)] for member, score in answer]
    if kind == "stream":
        return [[entry, [part for pair in fields.items() for part in pair]] for entry, fields in answer]
    return list(answer)


def export_run(url: str, run: str, path: Path) -> Backup:
    """Write a run to ``path``; the run may go on meanwhile. The file is whole, or not there.

    Needs room for all but the trajectories in memory.

    Raises:
        UnknownRun: there is no such run.
        RoqError: finished groups left faster than they could be read; pause the run or stop the trainer.
        ConfigError: the file exists already or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; name another file")
    with Scheduler(url, run) as scheduler:
        scheduler.config()  # the library and the run are there
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    keys = keys_of(run)
    try:
        with _node(url, keys["config"]) as client:
            for _ in range(_TRIES):
                draft.touch(mode=0o600, exist_ok=False)
                with draft.open("wb") as file:
                    backup = _export(client, run, keys, _Writer(file))
                    file.flush()
                    os.fsync(file.fileno())
                if backup is not None:
                    draft.rename(path)
                    return backup
                draft.unlink()
    except OSError as error:
        if isinstance(error, RoqError):
            raise
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
    raise RoqError(
        f"in {_TRIES} tries, finished groups of run {run} left faster than they could be read; "
        "pause the run (roq pause) and stop its trainer for the time of the export"
    )


def _export(client: Any, run: str, keys: Mapping[str, str], out: _Writer) -> Backup | None:
    """One try; None when a trajectory has left before it was read."""
    whole = [name for name in KINDS if name not in _APART]
    with client.pipeline(transaction=True) as pipe:
        for name in whole:
            command, *rest = _READ[KINDS[name]]
            pipe.execute_command(command, keys[name], *rest)
        pipe.execute_command("HKEYS", keys["payloads"])
        pipe.execute_command("XREVRANGE", keys["events"], "+", "-", "COUNT", 1)
        *answers, members, newest = pipe.execute()
    found = dict(zip(whole, answers, strict=True))
    if not found["config"]:
        raise UnknownRun(f"there is no run {run!r} on this server any more")
    version = int(found["state"][b"version"])
    out.add(Header(roq_export=FORMAT, run=run, library=_library.version(), version=version, at=time.time()))
    for name in whole:
        items = _items(KINDS[name], found[name])
        many = _PORTION if name == "prefixes" else _PAGE
        for start in range(0, len(items), many):
            out.add(_Part(name, items[start : start + many]))
    for start in range(0, len(members), _PORTION):
        names: Sequence[bytes] = members[start : start + _PORTION]
        data = client.execute_command("HMGET", keys["payloads"], *names)
        if None in data:
            return None
        out.add(_Part("payloads", [list(pair) for pair in zip(names, data, strict=True)]))
    events, after = 0, "-"
    while newest:
        page = client.execute_command("XRANGE", keys["events"], after, newest[0][0], "COUNT", _PAGE)
        if not page:
            break
        out.add(_Part("events", _items("stream", page)))
        events += len(page)
        after = f"({page[-1][0].decode()}"
    out.end()
    return Backup(run, version, len(members), events, out.bytes)


# ---- import --------------------------------------------------------------------------------------


def import_run(url: str, path: Path) -> Backup:
    """Restore a run under its own name. All of it is there afterwards, or nothing is.

    Leases have most likely run out meanwhile: their claims are issued again, as after any outage.

    Raises:
        ConfigError: the file is damaged, or of a newer roq.
        ConfigMismatch: the run exists on this server.
        UnsuitableServer: the server has not enough memory.
    """
    header = read_header(path)
    counts = _counted(path)  # reads all of it, before anything is written
    with Scheduler(url, header.run) as scheduler:
        try:
            scheduler.config()  # loads the library
        except UnknownRun:
            pass
        else:
            raise _exists(header.run)
    keys = keys_of(header.run)
    beside = {name: f"{keys['config'].removesuffix('config')}import:{name}" for name in KINDS}
    with _node(url, keys["config"]) as client:
        try:
            client.delete(*beside.values())  # of an import that was killed
            for part in _parts(path):
                _write(client, beside[part.key], part)
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(*keys.values())
                if pipe.exists(*keys.values()):
                    raise _exists(header.run)
                pipe.multi()
                for name, count in counts.items():
                    if count:
                        pipe.rename(beside[name], keys[name])
                pipe.execute()
        except exceptions.WatchError:
            raise _exists(header.run) from None
        except exceptions.OutOfMemoryError:
            raise UnsuitableServer(
                f"the server has not enough memory for {path}; raise its maxmemory. Nothing was restored"
            ) from None
        finally:
            client.delete(*beside.values())
    return Backup(header.run, header.version, counts["payloads"], counts["events"], path.stat().st_size)


def _counted(path: Path) -> dict[str, int]:
    """The number of items of each key, once all of a file is read and makes up a run.

    Raises:
        ConfigError: it is damaged, or what it holds contradicts itself.
    """
    counts = dict.fromkeys(KINDS, 0)
    content: dict[str, list[Any]] = {name: [] for name in KINDS}
    newest: dict[str, tuple[int, int]] = {}
    for part in _parts(path):
        counts[part.key] += len(part.items)
        if KINDS[part.key] == "stream":
            first, last = (id_order(part.items[i][0].decode()) for i in (0, -1))
            if first <= newest.get(part.key, (0, 0)):
                raise _damaged(path)
            newest[part.key] = last
        elif part.key in ("payloads", "prefixes"):
            content[part.key] += [name for name, _ in part.items]
        elif KINDS[part.key] == "list":
            content[part.key] += part.items
        else:
            content[part.key] += chain.from_iterable(part.items)
    problem = why_not([x for name, items in content.items() for x in (name.encode(), items)])
    if problem is not None:
        raise ConfigError(f"{path} holds no run that could go on ({problem[:200]}); take another copy")
    return counts


def _exists(run: str) -> ConfigMismatch:
    return ConfigMismatch(f"run {run!r} exists on this server; an import never changes a run that is there")


def _write(client: Any, key: str, part: _Part) -> None:
    match KINDS[part.key]:
        case "hash":
            client.execute_command("HSET", key, *(text for pair in part.items for text in pair))
        case "zset":
            client.execute_command("ZADD", key, *(x for member, score in part.items for x in (score, member)))
        case "list":
            client.execute_command("RPUSH", key, *part.items)
        case _:
            with client.pipeline(transaction=False) as pipe:
                for entry, fields in part.items:
                    pipe.execute_command("XADD", key, entry, *fields)
                pipe.execute()
