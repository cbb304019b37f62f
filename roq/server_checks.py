"""Is a server there, and is a run safe on it? Asked before anything is stored on it."""

# redis-py leaves its keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from roq.errors import ConfigError, ServerUnavailable, UnsuitableServer

__all__ = ["OLDEST", "check_server", "masked", "ping", "server_rss", "wait_for_server"]

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


def _connect(url: str, timeout_s: float = 3.0) -> redis.Redis:
    """A connection that fails at once instead of retrying.

    Raises:
        ConfigError: the URL itself is wrong.
    """
    try:
        return redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"the server URL {masked(url)!r} cannot be used: {error}") from None


def ping(url: str) -> Literal["ready", "loading", "away"]:
    """Whether the server answers; "loading" while it reads its data back."""
    with _connect(url, timeout_s=1.0) as client:
        try:
            client.ping()
        except exceptions.BusyLoadingError:
            return "loading"
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            return "away"
    return "ready"


def masked(url: str) -> str:
    """The URL without its password, for messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def wait_for_server(url: str, timeout_s: float = 60.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Return once the server answers; ``say`` hears once a wait begins and every 10 s of it.

    Raises:
        ConfigError: the URL is wrong, or the server refuses its user or password.
        ServerUnavailable: it stayed away for ``timeout_s``.
    """
    begun, told = time.monotonic(), 0.0
    with _connect(url) as client:
        while True:
            try:
                client.ping()
            except exceptions.AuthenticationError as error:
                raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
            except exceptions.ResponseError as error:
                if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                    raise ConfigError(f"the server at {masked(url)} refuses the login: {error}") from None
                reason = str(error)
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                reason = str(error)
            else:
                return
            waited = time.monotonic() - begun
            if waited >= timeout_s:
                away = f"no server at {masked(url)} after {timeout_s:.0f} s ({reason})"
                raise ServerUnavailable(f"{away}; start it, or correct the URL")
            if waited >= told:
                told += 10.0
                say(f"waiting for the server at {masked(url)}, {timeout_s - waited:.0f} s more ({reason})")
            time.sleep(0.2)


def check_server(url: str) -> list[str]:
    """Whether a run is safe on the server: its version, eviction and durability. Returns the warnings.

    Raises:
        UnsuitableServer: too old for function libraries, or it may evict a run's keys.
        ServerUnavailable: it does not answer (see :func:`wait_for_server`).
    """
    where = f"the server at {masked(url)}"
    with _connect(url) as client:
        try:
            info: dict[str, object] = client.info()
            appendfsync = _setting(client, "appendfsync")
            policy = info.get("maxmemory_policy") or _setting(client, "maxmemory-policy")
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise ServerUnavailable(f"{where} does not answer: {error}") from None
    kind = "valkey" if "valkey_version" in info else "redis"
    version = str(info[f"{kind}_version"])
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
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


def server_rss(url: str) -> int | None:
    """The server's resident memory in bytes; None when it does not answer."""
    with _connect(url, timeout_s=1.0) as client:
        try:
            return int(client.info("memory")["used_memory_rss"])
        except (exceptions.RedisError, KeyError):
            return None


def _setting(client: redis.Redis, name: str) -> str | None:
    """A configuration value; None where the server (a managed one) does not show it."""
    try:
        return client.config_get(name).get(name)
    except exceptions.ResponseError:
        return None
