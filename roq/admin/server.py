"""Is a server there, and is a run safe on it? Asked before anything is stored on it."""

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

from roq.client.connect import connect, masked, sentinels_of, tls_trouble
from roq.errors import ConfigError, NotAllowed, ServerUnavailable, UnsuitableServer

__all__ = [
    "OLDEST",
    "check_server",
    "masked",
    "one_client",
    "ping",
    "server_rss",
    "setting",
    "version_of",
    "wait_for_server",
]

# The server does not answer now. (A cluster's clients report it with a class of their own.)
AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.RedisClusterException)

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


@contextmanager
def one_client(url: str, timeout_s: float = 3.0) -> Generator[Any]:
    """A client that fails at once instead of retrying; in a cluster, of its first master.

    Raises:
        ConfigError: the URL itself is wrong.
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
    """Whether the server answers; "loading" while it reads its data back."""
    try:
        with one_client(url, timeout_s=1.0) as client:
            client.ping()
    except exceptions.BusyLoadingError:
        return "loading"
    except AWAY:
        return "away"
    return "ready"


def wait_for_server(url: str, timeout_s: float = 60.0, log: Callable[[str], None] = lambda _: None) -> None:
    """Return once the server answers; ``log`` is called when a wait begins and every 10 s of it.

    Raises:
        ConfigError: the URL is wrong, or the server refuses its user or password.
        ServerUnavailable: it stayed away for ``timeout_s``.
    """
    begun, told = time.monotonic(), 0.0
    while True:
        try:
            with one_client(url) as client:
                client.ping()
        except exceptions.AuthenticationError as error:
            raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
        except exceptions.NoPermissionError:  # it answers, and knows our user
            return
        except exceptions.ResponseError as error:
            if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
            reason = str(error)
        except AWAY as error:
            if why := tls_trouble(error):
                raise ConfigError(f"no connection to the server at {masked(url)}: {why}") from None
            reason = str(error)
        except exceptions.RedisError as error:
            raise _no_redis(url, error) from None
        else:
            return
        waited = time.monotonic() - begun
        if waited >= timeout_s:
            away = f"no server at {masked(url)} after {timeout_s:.0f} s ({reason})"
            raise ServerUnavailable(f"{away}; start it, or correct the URL")
        if waited >= told:
            told += 10.0
            log(f"waiting for the server at {masked(url)}, {timeout_s - waited:.0f} s more ({reason})")
        time.sleep(0.2)


def check_server(url: str) -> list[str]:
    """Whether a run is safe on the server: its version, eviction and durability. Returns the warnings.

    Raises:
        UnsuitableServer: too old for function libraries, or it may evict a run's keys.
        ServerUnavailable: it does not answer (see :func:`wait_for_server`).
    """
    where = f"the server at {masked(url)}"
    with one_client(url) as client:
        try:
            info: dict[str, object] = client.info()
            appendfsync = setting(client, "appendfsync")
            policy = info.get("maxmemory_policy") or setting(client, "maxmemory-policy")
        except AWAY as error:
            raise ServerUnavailable(f"{where} does not answer: {error}") from None
        except exceptions.NoPermissionError as error:
            raise NotAllowed(f"{where} does not let this user ask about it: {error}; allow it INFO") from None
        except exceptions.RedisError as error:
            raise _no_redis(url, error) from None
    kind, version, number = version_of(info)
    if number < OLDEST[kind]:
        raise UnsuitableServer(
            f"{where} is {kind.title()} {version}; roq needs Redis >= 7.0 or Valkey >= 7.2"
        )
    if policy not in (None, "noeviction"):
        raise UnsuitableServer(
            f"{where} may evict a run's keys (maxmemory-policy is {policy}); "
            "run `CONFIG SET maxmemory-policy noeviction` on it"
        )
    warnings: list[str] = []
    if policy is None:
        warnings.append(f"{where} does not show its maxmemory-policy; make sure that it is noeviction")
    if str(info.get("aof_enabled", "")) == "0":
        warnings.append(
            f"{where} keeps no append-only file, so a crash of it loses the run; set appendonly yes"
        )
    elif appendfsync is None:
        warnings.append(
            f"{where} does not show its appendfsync; with anything but always a crash may lose writes"
        )
    elif appendfsync != "always":
        warnings.append(
            f"{where} has appendfsync {appendfsync}, so a crash of it may lose writes; set it to always"
        )
    return warnings


def version_of(info: Mapping[str, object]) -> tuple[str, str, tuple[int, ...]]:
    """The server's kind ("redis" or "valkey"), its version, and the first two numbers of that."""
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


def _no_redis(url: str, error: Exception) -> UnsuitableServer:
    """What answers, but not as a server of the protocol."""
    said = " ".join(str(error).split())[:200]
    return UnsuitableServer(
        f"what answers at {masked(url)} is no Redis or Valkey, or refuses to work: {said}; correct the URL"
    )


def setting(client: Any, name: str) -> str | None:
    """A configuration value; None where the server (a managed one) does not show it."""
    try:
        return client.config_get(name).get(name)
    except exceptions.ResponseError:
        return None
