"""Classify failed commands: transient failures are retried, all others become a roq error."""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections.abc import Sequence
from typing import Any, TypedDict

import tenacity
from redis import exceptions as rx

from roq.client.connect import masked, tls_trouble
from roq.client.operations import Call, Command, Many
from roq.errors import (
    ConfigError,
    NotAllowed,
    RoqError,
    ServerUnavailable,
    UnsuitableServer,
    is_refusal,
    refusal,
)
from roq.protocol import library
from roq.protocol.functions import KEEPERS, ROLES, roles_for

__all__ = [
    "FAILURES",
    "LIBRARY_MISSING",
    "accept_foreign_library",
    "check_version",
    "first_failure",
    "is_misled",
    "is_transient",
    "lacks_command",
    "lost_node",
    "replace_library",
    "retry_policy",
    "roles_of",
    "translate",
]

log = logging.getLogger("roq")

# The connection leads to the wrong server: a demoted master, a replica, a node that lost its slots. A new
# connection asks the name, the Sentinels or the cluster again. ClusterError: "TTL exhausted", while a slot
# migrates.
_MISLED = (rx.BusyLoadingError, rx.ReadOnlyError, rx.TryAgainError, rx.ClusterError)
_MISLED_CODES = (
    "READONLY ",
    "NOREPLICAS ",
    "UNBLOCKED ",
    "MASTERDOWN ",
    "LOADING ",
    "CLUSTERDOWN ",
    "TRYAGAIN ",
)
# Also transient: the server is unreachable or full.
_TRANSIENT = (
    *_MISLED,
    rx.ConnectionError,
    rx.TimeoutError,
    rx.OutOfMemoryError,
    rx.RedisClusterException,
)
# Also transient: someone else's script runs too long, the disk is full.
_TRANSIENT_CODES = (*_MISLED_CODES, "BUSY ", "MISCONF ", "OOM ")
FAILURES = (rx.RedisError, rx.RedisClusterException)  # the latter is not a RedisError
# Replies of servers and proxies that will never know a command, such as Redis 6, Envoy and Upstash.
_LACKS = re.compile(
    "unknown (sub)?command|unsupported command|command is not (available|supported|allowed)"
    "|cluster support disabled|cluster mode is not enabled",
    re.IGNORECASE,
)
LIBRARY_MISSING = "unction not found"  # the start of this text differs between servers
# Errors of a command inside a function that the caller's rules forbid: Redis, Valkey.
_INNER_REFUSALS = ("The user executing the script can't", "ACL failure in script")
_LOAD_IT = (
    "run `roq library | redis-cli -x FUNCTION LOAD REPLACE` (or any roq command) as an administrator "
    f"(role {' or '.join(KEEPERS)} of roq acl)"
)


def first_failure(answers: list[Any]) -> Exception | None:
    """The first reply of a batch that must be sent again: a transient failure, or a missing library."""
    for answer in answers:
        if isinstance(answer, Exception) and (is_transient(answer) or LIBRARY_MISSING in str(answer)):
            return answer
    return None


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed later."""
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError) or tls_trouble(error):
        return False
    if lacks_command(error):
        return False
    return isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_CODES)


def lacks_command(error: BaseException) -> bool:
    """True if the server, or a proxy before it, does not know a command that roq needs."""
    return not is_refusal(str(error)) and _LACKS.search(str(error)) is not None


def is_misled(error: BaseException) -> bool:
    """True if the call may succeed on a new connection, because this one leads to the wrong server."""
    return isinstance(error, _MISLED) or str(error).startswith(_MISLED_CODES)


def lost_node(error: AttributeError) -> rx.ClusterError | None:
    """The error of a call during which another thread read the cluster's nodes again; None for a bug of roq.

    redis-py shares one list of nodes between threads, and then asks None for its connection.
    """
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1] in ("redis.cluster", "redis.asyncio.cluster"):
        return rx.ClusterError(f"the cluster's nodes changed during the call: {error}")
    return None


def translate(error: Exception, url: str, roles: Sequence[str] = ROLES) -> RoqError:
    """The roq error for a redis-py error; ``roles`` are those that may send the failed command."""
    url = masked(url)
    message = str(error)
    if is_refusal(message):
        return refusal(message)
    if why := tls_trouble(error):
        return ConfigError(f"no connection to Redis at {url}: {why}")
    if lacks_command(error):
        return UnsuitableServer(
            f"Redis at {url} can never work: {message.strip()}; roq needs Redis 7.0, Valkey 7.2 or newer, "
            "with functions (FCALL), INFO and HELLO, and for redis+cluster:// a cluster: not this server, "
            "service or proxy"
        )
    if isinstance(error, rx.MovedError | rx.AskError):
        return ConfigError(f"Redis at {url} is a node of a cluster; start its URL with redis+cluster://")
    if is_transient(error):
        return ServerUnavailable(f"Redis at {url} is unreachable: {message}")
    if isinstance(error, rx.NoPermissionError):
        of = f"role {' or '.join(roles)}" if len(roles) < len(ROLES) else "any role"
        return NotAllowed(
            f"the user of Redis at {url} may not do this: {message}; "
            f"use a user of {of} with rules for this run (roq acl)"
        )
    if any(text in message for text in _INNER_REFUSALS):
        return NotAllowed(
            f"the user of Redis at {url} may call this function, but not every command in it: {message}; "
            "its rules are from another version of roq, generate them again with roq acl"
        )
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        return ConfigError(
            f"Redis at {url} refused the login: {message}; correct the URL's user or its password"
        )
    if LIBRARY_MISSING in message:
        return UnsuitableServer(
            f"the roq library of Redis at {url} lacks a function that this client calls; {_LOAD_IT}"
        )
    return RoqError(f"Redis at {url} failed: {message}")


def roles_of(command: Call | Many | Command | None) -> list[str]:
    """The roles that may send a command; all of them may read."""
    if isinstance(command, Many):
        command = command.calls[0]
    return roles_for(command.function) if isinstance(command, Call) else list(ROLES)


class Policy(TypedDict):
    """Arguments of tenacity's ``Retrying`` and ``AsyncRetrying``."""

    retry: tenacity.retry_if_exception
    wait: Any
    stop: Any
    before_sleep: Any
    reraise: bool


def retry_policy(url: str, retry_s: float | None, stop: threading.Event | None = None) -> Policy:
    """Back off with jitter for at most ``retry_s`` seconds (None: forever) or until ``stop`` is set, and log
    what the client waits for."""
    next_report = 0.5  # seconds; shorter outages are not reported

    def report(state: tenacity.RetryCallState) -> None:
        nonlocal next_report
        elapsed = state.seconds_since_start or 0.0
        if elapsed >= next_report:
            next_report = elapsed + 5.0
            error = state.outcome.exception() if state.outcome else None
            log.warning("waiting for Redis at %s (%.0f s so far): %s", masked(url), elapsed, error)

    ends = [] if retry_s is None else [tenacity.stop_after_delay(retry_s)]
    ends += [] if stop is None else [tenacity.stop_when_event_set(stop)]
    return {
        "retry": tenacity.retry_if_exception(is_transient),
        "wait": tenacity.wait_random_exponential(multiplier=0.05, max=2.0),
        "stop": tenacity.stop_any(*ends),
        "before_sleep": report,
        "reraise": True,
    }


def replace_library(loaded: str | None) -> bool:
    """True if this client's library must replace the server's, or the server has none.

    Raises:
        UnsuitableServer: the server has a newer library than this client understands.
    """
    if loaded is None:
        return True
    older = library.older_than_ours(loaded)
    if older is False:
        raise UnsuitableServer(
            f"the server has roq library {loaded}, this client has {library.version()}; upgrade the client"
        )
    return older is True


def accept_foreign_library(loaded: str | None) -> None:
    """Accept the server's library, if it is compatible: this user may not load another.

    Raises:
        UnsuitableServer: the server has no library, or one too old for this client.
    """
    ours = library.version()
    if loaded is None:
        raise UnsuitableServer(f"the server has no roq library, and this user may not load it; {_LOAD_IT}")
    if loaded.split(maxsplit=1)[0] != ours.split(maxsplit=1)[0]:
        raise UnsuitableServer(
            f"the server has roq library {loaded}, this client needs {ours}, and this user may not load it; "
            f"{_LOAD_IT} of this client's version"
        )
    log.warning(
        "the server has roq library %s, this client %s: same revision, so they are compatible", loaded, ours
    )


def check_version(info: dict[str, Any]) -> None:
    """Reject a server without function libraries.

    Raises:
        UnsuitableServer: it is older than Redis 7.0 or Valkey 7.2.
    """
    if "redis_version" not in info and info:  # a cluster answers for each node
        info = next(iter(info.values()))
    version = str(info.get("redis_version", "0"))
    if int(version.split(".", maxsplit=1)[0]) < 7:
        raise UnsuitableServer(f"this is Redis {version}; roq needs Redis 7.0 or Valkey 7.2, or newer")
