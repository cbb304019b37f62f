"""What ``roq doctor`` finds about the server: its version, library, users, durability, memory and clock."""

# redis-py leaves its return types untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from typing import Any

from redis import exceptions

from roq.admin.acl import written_commands
from roq.admin.doctor.finding import Finding, fail, ok, warn
from roq.admin.server import OLDEST, masked, setting, version_of
from roq.client.failures import LIBRARY_MISSING
from roq.config import Job
from roq.job.memory import run_bytes
from roq.protocol import functions as f
from roq.protocol import library
from roq.protocol.functions import ROLES, role_functions
from roq.text import size
from roq.types import Status

__all__ = [
    "clock",
    "durability",
    "eviction",
    "library",
    "memory",
    "probe",
    "restart",
    "role",
    "server_info",
    "version",
]

SKEW_S = 5.0
FULL = 0.9  # of maxmemory: the rest goes fast


def server_info(client: Any) -> dict[str, Any]:
    """What INFO says; empty when it may not be asked."""
    try:
        return client.info()
    except exceptions.RedisError:
        return {}


def version(url: str, info: dict[str, Any]) -> Finding:
    """Whether the server is new enough."""
    kind, version, number = version_of(info)
    where = f"{kind} {version} at {masked(url)}"
    if not info:
        return warn(
            "server", f"{masked(url)} answers, but not INFO: allow this user INFO, or use one of roq acl"
        )
    if number < OLDEST[kind]:
        return fail("server", f"{where}; upgrade it to Redis 7.0 or Valkey 7.2, or newer")
    return ok("server", where)


def probe(client: Any) -> tuple[str | None, set[str]]:
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


def loaded_library(loaded: str | None) -> Finding:
    """The library's version, held against ours."""
    ours = library.version()
    load = "roq library | redis-cli -x FUNCTION LOAD REPLACE"
    if loaded is None:
        return warn("library", f"not loaded, or not to be asked; the first client that may loads it ({load})")
    older = library.older_than_ours(loaded)
    if older is None:
        return ok("library", loaded)
    if older is False:
        return fail("library", f"{loaded} is newer than this client's {ours}; upgrade roq here")
    if loaded.split()[0] == ours.split()[0]:
        return warn(
            "library", f"{loaded}, this client's is {ours}: of one revision, the next client replaces it"
        )
    return warn(
        "library", f"{loaded} is older than this client's {ours}; {load} replaces it, also under a run"
    )


def role(client: Any, allowed: set[str], loaded: bool) -> Finding:
    """Who we are, and as which role of ``roq acl``."""
    user = _whoami(client)
    if user is None:
        return warn("user", "the server does not say who we are; use a user of roq acl")
    if not loaded:
        return ok("user", f"{user}; what it may do is seen once the library is loaded")
    if allowed == {function.name for function in f.FUNCTIONS}:
        return ok("user", f"{user} may call everything; on a network give each process its own (roq acl)")
    for name in ROLES:
        if allowed == {function.name for function in role_functions(name)}:
            return ok("user", f"{user}, with the rights of role {name}")
    return warn(
        "user", f"{user} may call {', '.join(sorted(allowed)) or 'nothing'}: no role of roq acl; make it anew"
    )


def _whoami(client: Any) -> str | None:
    try:
        answer = client.execute_command("ACL", "WHOAMI")
    except exceptions.RedisError:
        return None
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def durability(client: Any, info: dict[str, Any]) -> Finding:
    """Whether a crash of the server can lose writes."""
    if not info:
        return warn("persistence", "unknown: the server does not answer INFO")
    if str(info.get("aof_enabled")) != "1":
        return fail(
            "persistence", "no append-only file: a crash of the server loses the run; set appendonly yes"
        )
    for what in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if str(info.get(what, "ok")) != "ok":
            return fail(
                "persistence", f"{what} is {info[what]}; look at the server's log, and for a full disk"
            )
    fsync = setting(client, "appendfsync")
    if fsync is None:
        return warn(
            "persistence", "append-only file; appendfsync is not shown to this user, make sure of always"
        )
    if fsync != "always":
        return warn("persistence", f"appendfsync {fsync}: a crash may lose the last writes; set it to always")
    return ok("persistence", "append-only file, synced with every write")


def restart(client: Any, info: dict[str, Any], run: str | None) -> Finding | None:
    """Whether a restart reads everything back; None where that is no question, or cannot be seen.

    Redis, unlike Valkey, replays its append-only file with the rights of the user ``default``, and skips
    what that may not do.
    """
    kind, _, _ = version_of(info)
    if kind != "redis" or str(info.get("aof_enabled")) != "1":
        return None
    keys = f"roq:{{{run or 'run'}}}:state"
    commands = sorted(written_commands())
    try:
        arities = [abs(int(about[1])) for about in client.execute_command("COMMAND INFO", *commands)]
        refused = [
            command.lower()
            for command, arity in zip(commands, arities, strict=True)
            # its arguments do not matter, and all may be keys
            if str(client.execute_command("ACL", "DRYRUN", "default", command, *[keys] * (arity - 1))) != "OK"
        ]
    except exceptions.RedisError:
        if _whoami(client) != "default":
            return None
        return warn(
            "restart",
            "Redis reads its append-only file back with the rights of user default, which has not all: "
            "a restart may lose writes; ACL SETUSER default ~* &* +@all, as an administrator",
        )
    if refused:
        return fail(
            "restart",
            "Redis reads its append-only file back with the rights of user default, which may not run "
            f"{', '.join(refused)} on {keys}: a restart loses what they wrote. ACL SETUSER default ~* &* "
            "+@all, and so in the aclfile; it may be off",
        )
    return ok("restart", "user default may run all that the append-only file holds of a run")


def eviction(client: Any, info: dict[str, Any]) -> Finding:
    """Whether the server may drop a run's keys."""
    policy = info.get("maxmemory_policy") or setting(client, "maxmemory-policy")
    if policy is None:
        return warn("eviction", "maxmemory-policy is not shown to this user; make sure of noeviction")
    if policy != "noeviction":
        return fail("eviction", f"maxmemory-policy {policy} may drop a run's keys; set it to noeviction")
    return ok("eviction", "none (noeviction)")


def clock(client: Any) -> Finding:
    """The server's clock, held against ours."""
    before = time.time()
    try:
        seconds, micros = client.time()
    except exceptions.RedisError:
        return warn("clock", "not to be asked by this user")
    after = time.time()
    skew = seconds + micros / 1e6 - (before + after) / 2
    text = f"the server's is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} ours"
    if abs(skew) > SKEW_S:
        return warn("clock", f"{text}; nothing breaks, roq uses the server's alone, but logs will not match")
    return ok("clock", text)


def memory(info: dict[str, Any], job: Job | None, status: Status | None) -> Finding:
    """What is used, and what the run can need."""
    if not info:
        return warn("memory", "unknown: the server does not answer INFO")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory") or 0)
    machine = int(info.get("total_system_memory") or 0)
    parts = [
        f"{size(used)} used",
        f"limit {size(limit)}" if limit else f"no limit, machine {size(machine)}",
    ]
    if status is not None:
        parts.append(f"{size(status.payload_bytes)} of it this run's trajectories")
    room, need = limit or machine, 0
    if job is not None:
        need = run_bytes(job)
        budget = job.protocol.max_payload_bytes
        parts.append(f"with the longest responses the run needs {size(need)}")
        if budget is not None and budget < need:
            need = budget
            parts.append(f"max_payload_bytes stops admission at {size(budget)}")
    text = ", ".join(parts)
    if limit and used > FULL * limit:
        return fail(
            "memory", f"{text}; nearly full: raise maxmemory (CONFIG SET maxmemory …, also under a run)"
        )
    if room and need > room:
        return warn(
            "memory",
            f"{text}; raise maxmemory, or set protocol.max_payload_bytes or a shorter checkpoint_every",
        )
    return ok("memory", text)
