"""Export a run to one file, and import it into a server of any kind and version.

:mod:`roq.admin.backup_file` defines the file format.

An export is consistent without stopping the run: one transaction reads everything except the trajectories and
the events. A trajectory never changes and events are only appended, so these two are read afterwards, in
portions, up to the time of the transaction. If a trajectory was deleted in between, the export starts over.

An import is atomic: it writes temporary keys and renames them in one transaction.
"""

# redis-py leaves the cluster's types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from redis import exceptions
from redis.cluster import RedisCluster

from roq.admin.backup_file import FORMAT, Header, Part, Writer, damaged, parts, read_header
from roq.admin.importable import problem_of
from roq.client import Scheduler
from roq.client.connect import connect, sentinels_of
from roq.client.failures import FAILURES, translate
from roq.errors import ConfigError, ConfigMismatch, RoqError, UnknownRun, UnsuitableServer
from roq.events.event import id_order
from roq.protocol import library
from roq.protocol.functions import KEEPERS
from roq.protocol.keys import KINDS, keys_of

__all__ = ["Backup", "Header", "export_run", "import_run", "read_header", "what_it_runs"]

_PORTION = 16  # trajectories in one command: each may have max_trajectory_bytes
_PAGE = 1000  # events, and fields of other keys, in one command
_TRIES = 5
_APART = ("payloads", "events")  # read after the transaction
_TIMEOUT_S = 60.0  # one command of a backup may transfer a lot of data


class Backup(msgspec.Struct, frozen=True):
    """The size of an export or import."""

    run: str
    version: int
    trajectories: int
    events: int
    bytes: int


# ---- export --------------------------------------------------------------------------------------


@contextmanager
def _node(url: str, key: str) -> Generator[Any]:
    """Open a client of the server that holds the run; in a cluster, all its keys are on one node."""
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
        for one in (client, *sentinels_of(client)):
            one.close()


_READ: dict[str, tuple[str | int, ...]] = {
    "hash": ("HGETALL",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "list": ("LRANGE", 0, -1),
    "stream": ("XRANGE", "-", "+"),
}


def _items(kind: str, answer: Any) -> list[Any]:
    """A key's content from redis-py, as items of a part."""
    if kind == "hash":
        return [list(pair) for pair in answer.items()]
    if kind == "zset":
        return [[member, float(score)] for member, score in answer]
    if kind == "stream":
        return [[entry, [part for pair in fields.items() for part in pair]] for entry, fields in answer]
    return list(answer)


def export_run(url: str, run: str, path: Path) -> Backup:
    """Write a run to ``path``; the run may continue. The file is complete or absent.

    Needs memory for everything except the trajectories.

    Raises:
        UnknownRun: the run does not exist.
        RoqError: finished groups left faster than they could be read; pause the run or stop the trainer.
        ConfigError: the file exists already or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} already exists; name another file")
    with Scheduler(url, run) as scheduler:
        scheduler.config()  # checks that the library and the run exist
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    keys = keys_of(run)
    try:
        with _node(url, keys["config"]) as client:
            for _ in range(_TRIES):
                draft.touch(mode=0o600, exist_ok=False)
                with draft.open("wb") as file:
                    backup = _export(client, run, keys, Writer(file))
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
        "pause the run (roq pause) and stop its trainer during the export"
    )


def _export(client: Any, run: str, keys: Mapping[str, str], out: Writer) -> Backup | None:
    """Try once; None if a trajectory was deleted before it was read."""
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
        raise UnknownRun(f"run {run!r} no longer exists on this server")
    version = int(found["state"][b"version"])
    out.add(Header(roq_export=FORMAT, run=run, library=library.version(), version=version, at=time.time()))
    for name in whole:
        items = _items(KINDS[name], found[name])
        many = _PORTION if name == "prefixes" else _PAGE
        for start in range(0, len(items), many):
            out.add(Part(name, items[start : start + many]))
    for start in range(0, len(members), _PORTION):
        names: Sequence[bytes] = members[start : start + _PORTION]
        data = client.execute_command("HMGET", keys["payloads"], *names)
        if None in data:
            return None
        out.add(Part("payloads", [list(pair) for pair in zip(names, data, strict=True)]))
    events, after = 0, "-"
    while newest:
        page = client.execute_command("XRANGE", keys["events"], after, newest[0][0], "COUNT", _PAGE)
        if not page:
            break
        out.add(Part("events", _items("stream", page)))
        events += len(page)
        after = f"({page[-1][0].decode()}"
    out.end()
    return Backup(run, version, len(members), events, out.bytes)


# ---- import --------------------------------------------------------------------------------------


_RUNS = ("reward.", "post_process", "model.", "data.", "rollout.engine", "run.", "logging.")


def what_it_runs(path: Path) -> dict[str, str]:
    """The settings in a file that decide which code runs, on which files and with which engine arguments.

    A file's digest detects damage, not its author: workers import the functions that it names.

    Raises:
        ConfigError: the file is damaged.
    """
    found: dict[str, str] = {}
    for part in parts(path):
        if part.key == "config":
            for name, value in part.items:
                text = name.decode(errors="replace")
                if text.startswith(_RUNS):
                    found[text] = value.decode(errors="replace")
    return dict(sorted(found.items()))


def import_run(url: str, path: Path) -> Backup:
    """Restore a run under its name. Atomic: either everything is restored or nothing is.

    Leases have most likely expired since the export: their claims are issued again, as after any outage.

    Raises:
        ConfigError: the file is damaged, or from a newer roq.
        ConfigMismatch: the run exists on this server.
        UnsuitableServer: the server does not have enough memory.
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
    temporary = {name: f"{keys['config'].removesuffix('config')}import:{name}" for name in KINDS}
    with _node(url, keys["config"]) as client:
        try:
            client.delete(*temporary.values())  # of an import that was killed
            for part in parts(path):
                _write(client, temporary[part.key], part)
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(*keys.values())
                if pipe.exists(*keys.values()):
                    raise _exists(header.run)
                pipe.multi()
                for name, count in counts.items():
                    if count:
                        pipe.rename(temporary[name], keys[name])
                pipe.execute()
        except exceptions.WatchError:
            raise _exists(header.run) from None
        except exceptions.OutOfMemoryError:
            raise UnsuitableServer(
                f"the server lacks the memory for {path}; raise its maxmemory. Nothing was restored"
            ) from None
        finally:
            client.delete(*temporary.values())
    return Backup(header.run, header.version, counts["payloads"], counts["events"], path.stat().st_size)


def _counted(path: Path) -> dict[str, int]:
    """Read and check a whole file; returns the number of items of each key.

    Raises:
        ConfigError: the file is damaged or inconsistent.
    """
    counts = dict.fromkeys(KINDS, 0)
    content: dict[str, list[Any]] = {name: [] for name in KINDS}
    newest: dict[str, tuple[int, int]] = {}
    for part in parts(path):
        counts[part.key] += len(part.items)
        if KINDS[part.key] == "stream":
            first, last = (id_order(part.items[i][0].decode()) for i in (0, -1))
            if first <= newest.get(part.key, (0, 0)):
                raise damaged(path)
            newest[part.key] = last
        elif part.key in ("payloads", "prefixes"):
            content[part.key] += [name for name, _ in part.items]
        elif KINDS[part.key] == "list":
            content[part.key] += part.items
        else:
            content[part.key] += chain.from_iterable(part.items)
    problem = problem_of([x for name, items in content.items() for x in (name.encode(), items)])
    if problem is not None:
        raise ConfigError(f"{path} does not contain a valid run ({problem[:200]}); use another copy")
    return counts


def _exists(run: str) -> ConfigMismatch:
    return ConfigMismatch(f"run {run!r} already exists on this server; an import never changes a run")


def _write(client: Any, key: str, part: Part) -> None:
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
