"""``roq doctor``: whether a deployment can carry a run, before it starts and while it goes on.

Looks only. All that it writes is a small file in the run's folder and in its weight store, removed again.
"""

# redis-py leaves its return types untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Literal

import msgspec
from redis import exceptions

from roq import _functions as f
from roq import _library
from roq._session import LIBRARY_MISSING
from roq.acl import ROLES, role_functions
from roq.checks import check_model, check_weights
from roq.client import Scheduler
from roq.config import Job
from roq.display import worker_info
from roq.errors import RoqError, UnknownRun
from roq.jobs import read_job
from roq.server_checks import OLDEST, masked, one_client, setting, version_of, wait_for_server
from roq.sizing import run_bytes
from roq.types import Status
from roq.weight_store import FolderStore, is_url, weight_store

__all__ = ["Finding", "examine"]

REACH_S = 3.0
SKEW_S = 5.0
FULL = 0.9  # of maxmemory: the rest goes fast
SILENT_S = 120.0  # a trainer that long unseen


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, how it is, and in ``text`` what there is and what to do."""

    name: str
    state: Literal["ok", "warning", "failed"]
    text: str


def _ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def _warn(name: str, text: str) -> Finding:
    return Finding(name, "warning", text)


def _fail(name: str, text: str) -> Finding:
    return Finding(name, "failed", text)


def examine(url: str | None, run: str | None, job: Job | None) -> Iterator[Finding]:
    """Look at a server, a run on it and its files; what cannot be asked is a finding too.

    Args:
        url: of the server; None when the job's own is not started yet.
        run: the run's name; None looks at the server alone.
        job: what is to run, if known; otherwise the one that the run was created with.
    """
    if job is not None:
        yield _model(job)
    if url is None:
        yield _warn("server", "not started yet; roq up starts one of its own in the run's folder")
    else:
        try:
            wait_for_server(url, REACH_S)
        except RoqError as error:
            yield _fail("server", str(error))
            return
        status: Status | None = None
        with one_client(url) as client:
            info = _info(client)
            yield _version(url, info)
            loaded, allowed = _probe(client)
            yield _library_line(loaded)
            yield _role_line(client, allowed, loaded is not None)
            yield _durability(client, info)
            yield _eviction(client, info)
            yield _clock(client)
        if run is not None and loaded != _library.version():
            # A client would load its own; that is not for one that only looks to decide.
            yield _warn("run", f"{run} is not looked at: the server has not this client's library")
        elif run is not None:
            with Scheduler(url, run, retry_s=REACH_S) as scheduler:
                try:
                    status, job = scheduler.status(), job or _job_of(scheduler)
                    broken = scheduler.verify()
                    published = scheduler.newest_event("publish")
                except UnknownRun:
                    yield _warn("run", f"{run} is not created on this server yet; roq init creates it")
                except RoqError as error:
                    yield _fail("run", str(error))
                else:
                    yield _run(status, broken)
                    yield from _processes(status)
                    if status.version > 0:
                        location = published.fields.get("weights") if published else None
                        yield _weights(location, status.version, job)
        yield _memory(info, job, status)
    if job is not None:
        yield from _files(job)


def _job_of(scheduler: Scheduler) -> Job | None:
    try:
        return read_job(scheduler)
    except UnknownRun:  # created from Python, without a job
        return None


# ---- the server ----------------------------------------------------------------------------------


def _info(client: Any) -> dict[str, Any]:
    try:
        return client.info()
    except exceptions.RedisError:
        return {}


def _version(url: str, info: dict[str, Any]) -> Finding:
    kind, version, number = version_of(info)
    where = f"{kind} {version} at {masked(url)}"
    if not info:
        return _warn(
            "server", f"{masked(url)} answers, but not INFO: allow this user INFO, or use one of roq acl"
        )
    if number < OLDEST[kind]:
        return _fail("server", f"{where}; upgrade it to Redis 7.0 or Valkey 7.2, or newer")
    return _ok("server", where)


def _probe(client: Any) -> tuple[str | None, set[str]]:
    """The library's version, and the functions that our user may call.

    Called without arguments they refuse, and change nothing.
    """
    loaded: str | None = None
    allowed: set[str] = set()
    for function in f.FUNCTIONS:
        command = "FCALL_RO" if function.reads else "FCALL"
        try:
            answer = client.execute_command(command, f"roq_{function.name}", 0)
        except exceptions.NoPermissionError:
            continue
        except exceptions.ResponseError as error:
            if LIBRARY_MISSING in str(error):
                continue  # told by the library's own line
        else:
            if function is f.VERSION:
                loaded = answer.decode() if isinstance(answer, bytes) else str(answer)
        allowed.add(function.name)
    return loaded, allowed


def _library_line(loaded: str | None) -> Finding:
    ours = _library.version()
    load = "roq library | redis-cli -x FUNCTION LOAD REPLACE"
    if loaded is None:
        return _warn(
            "library", f"not loaded, or not to be asked; the first client that may loads it ({load})"
        )
    older = _library.older_than_ours(loaded)
    if older is None:
        return _ok("library", loaded)
    if older is False:
        return _fail("library", f"{loaded} is newer than this client's {ours}; upgrade roq here")
    if loaded.split()[0] == ours.split()[0]:
        return _warn(
            "library", f"{loaded}, this client's is {ours}: of one revision, the next client replaces it"
        )
    return _warn(
        "library", f"{loaded} is older than this client's {ours}; {load} replaces it, also under a run"
    )


def _role_line(client: Any, allowed: set[str], loaded: bool) -> Finding:
    try:
        answer = client.execute_command("ACL", "WHOAMI")
    except exceptions.RedisError:
        return _warn("user", "the server does not say who we are; use a user of roq acl")
    user = answer.decode() if isinstance(answer, bytes) else str(answer)
    if not loaded:
        return _ok("user", f"{user}; what it may do is seen once the library is loaded")
    if allowed == {function.name for function in f.FUNCTIONS}:
        return _ok("user", f"{user} may call everything; on a network give each process its own (roq acl)")
    for role in ROLES:
        if allowed == {function.name for function in role_functions(role)}:
            return _ok("user", f"{user}, with the rights of role {role}")
    return _warn(
        "user", f"{user} may call {', '.join(sorted(allowed)) or 'nothing'}: no role of roq acl; make it anew"
    )


def _durability(client: Any, info: dict[str, Any]) -> Finding:
    if not info:
        return _warn("persistence", "unknown: the server does not answer INFO")
    if str(info.get("aof_enabled")) != "1":
        return _fail(
            "persistence", "no append-only file: a crash of the server loses the run; set appendonly yes"
        )
    for what in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if str(info.get(what, "ok")) != "ok":
            return _fail(
                "persistence", f"{what} is {info[what]}; look at the server's log, and for a full disk"
            )
    fsync = setting(client, "appendfsync")
    if fsync is None:
        return _warn(
            "persistence", "append-only file; appendfsync is not shown to this user, make sure of always"
        )
    if fsync != "always":
        return _warn(
            "persistence", f"appendfsync {fsync}: a crash may lose the last writes; set it to always"
        )
    return _ok("persistence", "append-only file, synced with every write")


def _eviction(client: Any, info: dict[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy") or setting(client, "maxmemory-policy")
    if policy is None:
        return _warn("eviction", "maxmemory-policy is not shown to this user; make sure of noeviction")
    if policy != "noeviction":
        return _fail("eviction", f"maxmemory-policy {policy} may drop a run's keys; set it to noeviction")
    return _ok("eviction", "none (noeviction)")


def _clock(client: Any) -> Finding:
    before = time.time()
    try:
        seconds, micros = client.time()
    except exceptions.RedisError:
        return _warn("clock", "not to be asked by this user")
    after = time.time()
    skew = seconds + micros / 1e6 - (before + after) / 2
    text = f"the server's is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} ours"
    if abs(skew) > SKEW_S:
        return _warn("clock", f"{text}; nothing breaks, roq uses the server's alone, but logs will not match")
    return _ok("clock", text)


def _memory(info: dict[str, Any], job: Job | None, status: Status | None) -> Finding:
    if not info:
        return _warn("memory", "unknown: the server does not answer INFO")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory") or 0)
    machine = int(info.get("total_system_memory") or 0)
    parts = [
        f"{_size(used)} used",
        f"limit {_size(limit)}" if limit else f"no limit, machine {_size(machine)}",
    ]
    if status is not None:
        parts.append(f"{_size(status.payload_bytes)} of it this run's trajectories")
    room, need = limit or machine, 0
    if job is not None:
        need = run_bytes(job)
        budget = job.protocol.max_payload_bytes
        parts.append(f"with the longest responses the run needs {_size(need)}")
        if budget is not None and budget < need:
            need = budget
            parts.append(f"max_payload_bytes stops admission at {_size(budget)}")
    text = ", ".join(parts)
    if limit and used > FULL * limit:
        return _fail(
            "memory", f"{text}; nearly full: raise maxmemory (CONFIG SET maxmemory …, also under a run)"
        )
    if room and need > room:
        return _warn(
            "memory",
            f"{text}; raise maxmemory, or set protocol.max_payload_bytes or a shorter checkpoint_every",
        )
    return _ok("memory", text)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# ---- the run -------------------------------------------------------------------------------------


def _run(status: Status, broken: list[str]) -> Finding:
    where = f"{status.run} at step {status.version}"
    if broken:
        return _fail(
            "run",
            f"{where} breaks {len(broken)} invariants (roq verify; keep a roq export): {broken[0]}",
        )
    if status.ended:
        return _ok("run", f"{where}, ended")
    if status.paused:
        return _warn("run", f"{where}, paused; roq resume goes on")
    if status.ledger.dead:
        return _warn(
            "run", f"{where}; {status.ledger.dead} prompts were given up: roq dead lists them, with why"
        )
    return _ok("run", f"{where}, all invariants hold")


def _processes(status: Status) -> Iterator[Finding]:
    ours, over = package_version("roq"), status.ended
    alive = [worker for worker in status.workers if worker.lease_left_s > 0]
    told = {worker.worker: str(worker_info(worker).get("roq", "unknown")) for worker in alive}
    other = {worker: said for worker, said in told.items() if said not in (ours, "unknown")}
    sick = [worker for worker in alive if worker_info(worker).get("error")]
    if other:
        named = ", ".join(f"{worker} {said}" for worker, said in sorted(other.items())[:4])
        yield _warn(
            "workers", f"{len(alive)} alive; of another roq than {ours}: {named}; replace them one by one"
        )
    elif sick:
        error = str(worker_info(sick[0])["error"])[:200]
        yield _warn("workers", f"{len(alive)} alive; {sick[0].worker} says: {error}")
    elif not alive and not over:
        yield _warn("workers", "none alive: start some (python -m roq_worker --redis URL --run NAME)")
    else:
        yield _ok("workers", f"{len(alive)} alive, roq {', '.join(sorted(set(told.values()))) or ours}")
    seen = status.trainer_seen_s
    if over:
        yield _ok("trainer", "done")
    elif seen is None:
        yield _warn("trainer", "none has come yet (python -m roq_trainer --redis URL --run NAME)")
    elif seen > SILENT_S and status.training is None:
        yield _warn(
            "trainer",
            f"{status.trainer} was seen {seen:.0f} s ago; start it again, it goes on from its checkpoint",
        )
    else:
        yield _ok("trainer", f"{status.trainer} seen {seen:.0f} s ago")


# ---- files ---------------------------------------------------------------------------------------


def _model(job: Job) -> Finding:
    length = job.data.max_prompt_tokens + job.rollout.max_tokens
    try:
        check_model(job.model.path, engines_here=False, max_model_len=length)
    except RoqError as error:
        return _fail("model", str(error))
    return _ok("model", job.model.path)


def _weights(location: str | None, version: int, job: Job | None) -> Finding:
    """The newest published version, as a worker on this host would find it."""
    if not location:
        return _warn("weights", "where the newest are is not in the run's events any more")
    if is_url(location):
        if job is None:
            return _warn("weights", f"{location}: the run has no job that names its store, so it is not read")
        try:
            whole = weight_store(job.run).is_whole(version)
        except RoqError as error:
            return _fail("weights", str(error))
        if not whole:
            return _fail(
                "weights", f"{location} is not whole; a trainer that is started again writes it anew"
            )
        return _ok("weights", f"{location}, whole")
    folder = Path(location)
    if not folder.is_dir():
        return _fail("weights", f"{location} is not here; mount that folder here, under the same path")
    try:
        check_weights(folder)
    except RoqError as error:
        return _fail("weights", str(error))
    return _ok("weights", f"{location}, readable and whole")


def _files(job: Job) -> Iterator[Finding]:
    """Where the trainer writes and workers read."""
    yield _writable("folder", Path(job.run.dir))
    if job.run.weights is None:
        return
    try:
        store = weight_store(job.run)
        if isinstance(store, FolderStore):
            yield _writable("store", store.root)
            return
        store.probe()
    except RoqError as error:
        yield _fail("store", str(error))
    else:
        yield _ok("store", f"{store.url}: an object was written, read and deleted")


def _writable(name: str, folder: Path) -> Finding:
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".roq-doctor-"):
            free = os.statvfs(there)
    except OSError as error:
        return _fail(
            name,
            f"{folder} cannot be written here ({error.strerror}); the trainer must, and workers must read it",
        )
    return _ok(name, f"{folder} is writable, {_size(free.f_bavail * free.f_frsize)} free")
