"""The checks of ``roq doctor`` on the server: its library, user, restart, memory and clock."""

# redis-py leaves its return types untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from typing import Any

from redis import exceptions

from roq.admin.acl import written_commands
from roq.admin.finding import Finding, fail, ok, warn
from roq.admin.server import version_of
from roq.client.failures import LIBRARY_MISSING, lacks_command, translate
from roq.config import Job
from roq.job.memory import run_bytes
from roq.protocol import functions as f
from roq.protocol import library
from roq.protocol.functions import ROLES, role_functions
from roq.text import size
from roq.types import Status

__all__ = [
    "clock",
    "lacking",
    "loaded_library",
    "memory",
    "probe",
    "restart",
    "role",
    "server_info",
]

SKEW_S = 5.0
FULL = 0.9  # of maxmemory; the rest fills quickly


def server_info(client: Any) -> dict[str, Any]:
    """The reply to INFO; empty if this user may not call it."""
    try:
        return client.info()
    except exceptions.RedisError:
        return {}


def lacking(client: Any, url: str) -> Finding | None:
    """Find out whether the server, or a proxy before it, lacks a command without which no run works."""
    version = f"roq_{f.VERSION.name}"
    try:
        for command in (("INFO", "server"), ("FCALL_RO", version, 0), ("FCALL", version, 0)):
            try:
                client.execute_command(*command)
            except exceptions.ResponseError as error:
                if LIBRARY_MISSING in str(error):
                    client.execute_command("FUNCTION", "LIST")
                elif lacks_command(error):
                    raise
    except exceptions.RedisError as error:
        if lacks_command(error):
            return fail("server", str(translate(error, url)))
    return None


def probe(client: Any) -> tuple[str | None, set[str]]:
    """The library's version, and the functions that this user may call.

    The functions are called without arguments, which they refuse without a change.
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
                continue  # reported by loaded_library
        else:
            if function is f.VERSION:
                loaded = answer.decode() if isinstance(answer, bytes) else str(answer)
        allowed.add(function.name)
    return loaded, allowed


def loaded_library(loaded: str | None) -> Finding:
    """Compare the library's version with this client's."""
    ours = library.version()
    load = "roq library | redis-cli -x FUNCTION LOAD REPLACE"
    if loaded is None:
        return warn(
            "library",
            f"not loaded, or hidden from this user; the first client with the right loads it ({load})",
        )
    older = library.older_than_ours(loaded)
    if older is None:
        return ok("library", loaded)
    if older is False:
        return fail("library", f"{loaded} is newer than this client's {ours}; upgrade roq here")
    if loaded.split()[0] == ours.split()[0]:
        return warn(
            "library", f"{loaded}; this client has {ours}, the same revision: the next client replaces it"
        )
    return warn(
        "library", f"{loaded} is older than this client's {ours}; {load} replaces it, also during a run"
    )


def role(client: Any, allowed: set[str], loaded: bool) -> Finding:
    """Identify the user, and its role of ``roq acl``."""
    user = _whoami(client)
    if user is None:
        return warn("user", "the server does not name this user; use a user of roq acl")
    if not loaded:
        return ok("user", f"{user}; its rights can be checked once the library is loaded")
    if allowed == {function.name for function in f.FUNCTIONS}:
        return ok("user", f"{user} may call everything; on a network, give each process its user (roq acl)")
    for name in ROLES:
        if allowed == {function.name for function in role_functions(name)}:
            return ok("user", f"{user}, with the rights of role {name}")
    return warn(
        "user",
        f"{user} may call {', '.join(sorted(allowed)) or 'nothing'}: not a role of roq acl; create it again",
    )


def _whoami(client: Any) -> str | None:
    try:
        answer = client.execute_command("ACL", "WHOAMI")
    except exceptions.RedisError:
        return None
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def restart(client: Any, info: dict[str, Any], run: str | None) -> Finding | None:
    """Check that a restart reads everything back; None if that does not apply or cannot be checked.

    Redis, unlike Valkey, replays its append-only file with the rights of the user ``default``, and skips
    commands that this user may not run.
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
            # the arguments do not matter, so all are keys
            if str(client.execute_command("ACL", "DRYRUN", "default", command, *[keys] * (arity - 1))) != "OK"
        ]
    except exceptions.RedisError:
        if _whoami(client) != "default":
            return None
        return warn(
            "restart",
            "Redis replays its append-only file with the rights of user default, which are restricted: "
            "a restart may lose writes; run `ACL SETUSER default ~* &* +@all` as an administrator",
        )
    if refused:
        return fail(
            "restart",
            "Redis replays its append-only file with the rights of user default, which may not run "
            f"{', '.join(refused)} on {keys}: a restart loses these writes. Run `ACL SETUSER default ~* &* "
            "+@all`, and change the aclfile accordingly; the user may be off",
        )
    return ok("restart", "user default may run every command of a run in the append-only file")


def clock(client: Any) -> Finding:
    """Compare the server's clock with this host's."""
    before = time.time()
    try:
        seconds, micros = client.time()
    except exceptions.RedisError:
        return warn("clock", "this user may not call TIME")
    after = time.time()
    skew = seconds + micros / 1e6 - (before + after) / 2
    text = f"the server's is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} this host's"
    if abs(skew) > SKEW_S:
        return warn("clock", f"{text}; logs will not match, but roq uses only the server's clock")
    return ok("clock", text)


def memory(info: dict[str, Any], job: Job | None, status: Status | None) -> Finding:
    """Compare the memory in use and the run's need with the server's limit."""
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
            "memory", f"{text}; nearly full: raise maxmemory (CONFIG SET maxmemory …, also during a run)"
        )
    if room and need > room:
        return warn(
            "memory",
            f"{text}; raise maxmemory, or set protocol.max_payload_bytes or a shorter checkpoint_every",
        )
    return ok("memory", text)
