"""Check that a server is reachable and safe for a run, before anything is stored on it."""

# redis-py leaves its keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from redis import exceptions
from redis.cluster import RedisCluster

from roq.admin.finding import Finding, fail, ok, warn
from roq.client.connect import connect, masked, sentinels_of, tls_trouble
from roq.client.failures import lacks_command, translate
from roq.errors import ConfigError, NotAllowed, RoqError, ServerUnavailable, UnsuitableServer

__all__ = [
    "OLDEST",
    "check_server",
    "durability",
    "eviction",
    "masked",
    "one_client",
    "ping",
    "server_rss",
    "version",
    "version_of",
    "wait_for_server",
]

# The server is unreachable now; a cluster's clients have a separate class for it.
AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.RedisClusterException)

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


@contextmanager
def one_client(url: str, timeout_s: float = 3.0) -> Generator[Any]:
    """Open a client that fails at once instead of retrying; in a cluster, of its first master.

    Raises:
        ConfigError: the URL is invalid.
    """
    client = connect(url, decode_responses=True, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        if isinstance(client, RedisCluster):
            yield client.get_redis_connection(client.get_primaries()[0])
        else:
            yield client
    finally:
        for one in (client, *sentinels_of(client)):
            one.close()


def ping(url: str) -> Literal["ready", "loading", "away"]:
    """Ping the server: "loading" while it reads its data back, "away" if it does not answer."""
    try:
        with one_client(url, timeout_s=1.0) as client:
            client.ping()
    except exceptions.BusyLoadingError:
        return "loading"
    except AWAY:
        return "away"
    return "ready"


def wait_for_server(url: str, timeout_s: float = 60.0, log: Callable[[str], None] = lambda _: None) -> None:
    """Wait until the server answers; ``log`` is called when a wait starts and every 10 s.

    Raises:
        ConfigError: the URL is wrong, or the server refuses its user or password.
        UnsuitableServer: it lacks a command that roq needs.
        ServerUnavailable: it was unreachable for ``timeout_s``.
    """
    begun, next_log = time.monotonic(), 0.0
    while True:
        try:
            with one_client(url) as client:
                client.ping()
        except exceptions.AuthenticationError as error:
            raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
        except exceptions.NoPermissionError:  # it answers, and accepts the login
            return
        except exceptions.ResponseError as error:
            if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
            if lacks_command(error):
                raise translate(error, url) from None
            reason = str(error)
        except AWAY as error:
            if lacks_command(error):
                raise translate(error, url) from None
            if why := tls_trouble(error):
                raise ConfigError(f"no connection to the server at {masked(url)}: {why}") from None
            reason = str(error)
        except exceptions.RedisError as error:
            raise _not_redis(url, error) from None
        else:
            return
        waited = time.monotonic() - begun
        if waited >= timeout_s:
            away = f"no server at {masked(url)} after {timeout_s:.0f} s ({reason})"
            raise ServerUnavailable(f"{away}; start it, or correct the URL")
        if waited >= next_log:
            next_log += 10.0
            log(f"waiting for the server at {masked(url)} (up to {timeout_s - waited:.0f} s more): {reason}")
        time.sleep(0.2)


def check_server(url: str) -> list[str]:
    """Check that a run is safe on the server: its version, eviction and durability. Returns the warnings.

    Raises:
        UnsuitableServer: too old for function libraries, or it lacks a command, or it may evict a run's keys.
        ServerUnavailable: it does not answer (see :func:`wait_for_server`).
        NotAllowed: the user may not call INFO.
    """
    where = f"the server at {masked(url)}"
    with one_client(url) as client:
        try:
            info: dict[str, Any] = client.info()
            age, evicts, loses = version(url, info), eviction(client, info), durability(client, info)
        except AWAY as error:
            raise ServerUnavailable(f"{where} does not answer: {error}") from None
        except exceptions.NoPermissionError as error:
            raise NotAllowed(f"{where} does not let this user call INFO: {error}; allow it") from None
        except exceptions.RedisError as error:
            raise _not_redis(url, error) from None
    if age.state == "failed":
        raise UnsuitableServer(age.text)
    if evicts.state == "failed":
        raise UnsuitableServer(f"{where}: {evicts.text}")
    return [f"{where}: {finding.text}" for finding in (evicts, loses) if finding.state != "ok"]


def version(url: str, info: Mapping[str, Any]) -> Finding:
    """Check that the server is new enough."""
    kind, number, parts = version_of(info)
    where = f"{kind} {number} at {masked(url)}"
    if not info:
        return warn(
            "server", f"{masked(url)} answers, but not INFO: allow this user INFO, or use one of roq acl"
        )
    if parts < OLDEST[kind]:
        return fail("server", f"{where}; upgrade it to Redis 7.0 or Valkey 7.2, or newer")
    return ok("server", where)


def eviction(client: Any, info: Mapping[str, Any]) -> Finding:
    """Check that the server cannot evict a run's keys."""
    policy = info.get("maxmemory_policy") or _setting(client, "maxmemory-policy")
    if policy is None:
        return warn("eviction", "this user cannot see maxmemory-policy; make sure that it is noeviction")
    if policy != "noeviction":
        return fail("eviction", f"maxmemory-policy {policy} may evict a run's keys; set it to noeviction")
    return ok("eviction", "none (noeviction)")


def durability(client: Any, info: Mapping[str, Any]) -> Finding:
    """Check that a crash of the server cannot lose writes."""
    if not info:
        return warn("persistence", "unknown: the server does not answer INFO")
    if str(info.get("aof_enabled")) != "1":
        return fail(
            "persistence", "no append-only file: a crash of the server loses the run; set appendonly yes"
        )
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if str(info.get(name, "ok")) != "ok":
            return fail("persistence", f"{name} is {info[name]}; check the server's log and its disk")
    fsync = _setting(client, "appendfsync")
    if fsync is None:
        return warn(
            "persistence", "append-only file; this user cannot see appendfsync, make sure that it is always"
        )
    if fsync != "always":
        return warn("persistence", f"appendfsync {fsync}: a crash may lose the last writes; set it to always")
    return ok("persistence", "append-only file, synced with every write")


def version_of(info: Mapping[str, object]) -> tuple[str, str, tuple[int, ...]]:
    """The server's kind ("redis" or "valkey"), its version, and its first two numbers."""
    kind = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{kind}_version", "0"))
    return kind, version, tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def server_rss(url: str) -> int | None:
    """The server's resident memory in bytes; None when it does not answer."""
    with one_client(url, timeout_s=1.0) as client:
        try:
            return int(client.info("memory")["used_memory_rss"])
        except (exceptions.RedisError, KeyError):
            return None


def _not_redis(url: str, error: Exception) -> RoqError:
    """The error for a server that does not speak the Redis protocol, or lacks a command."""
    if lacks_command(error):
        return translate(error, url)
    reply = " ".join(str(error).split())[:200]
    return UnsuitableServer(
        f"the server at {masked(url)} does not speak the Redis protocol, or rejects commands: {reply}; "
        "correct the URL"
    )


def _setting(client: Any, name: str) -> str | None:
    """A configuration value; None if the server hides it, as managed ones do."""
    try:
        return client.config_get(name).get(name)
    except exceptions.ResponseError:
        return None
