"""From a URL to a redis-py client: one server, a master that Sentinels watch, or a cluster.

- ``redis://``, ``rediss://``, ``unix://``: one server.
- ``redis+sentinel://[user:password@]host[:26379],host…/service[/db]``: whoever is the master of
  ``service`` now.
- ``redis+cluster://[user:password@]host[:6379],host…``: a cluster; all keys of a run are in one slot.

Append ``s`` to ``redis`` for TLS. Retrying is the caller's: the clients made here never retry.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.retry
import redis.sentinel
from redis.backoff import NoBackoff

from roq.errors import ConfigError

__all__ = ["check_url", "companions", "connect", "connect_async", "masked"]

SOCKET_TIMEOUT_S = 5.0
_TIMEOUTS: dict[str, Any] = {
    "socket_timeout": SOCKET_TIMEOUT_S,
    "socket_connect_timeout": SOCKET_TIMEOUT_S,
}


class _Target(msgspec.Struct, frozen=True):
    kind: str  # "sentinel" or "cluster"
    hosts: list[tuple[str, int]]
    service: str
    options: dict[str, Any]


def _parse(url: str) -> _Target | None:
    """The parts of a Sentinel or cluster URL; None for one that redis-py understands by itself."""
    scheme, _, kind = url.partition("://")[0].partition("+")
    if not kind:
        return None
    if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ConfigError(f"{masked(url)!r} is not a Redis URL: use redis+sentinel://… or redis+cluster://…")
    parts = urlsplit(url)
    account, _, hosts = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    path = parts.path.strip("/").split("/")
    default = 26379 if kind == "sentinel" else 6379
    try:
        pairs = [node.partition(":") for node in hosts.split(",")]
        nodes = [(host, int(port or default)) for host, _, port in pairs]
        db = int(path[1]) if len(path) > 1 else 0
    except ValueError:
        raise ConfigError(f"{masked(url)!r} is not a Redis URL: ports and the database are numbers") from None
    if not all(host for host, _ in nodes) or (kind == "sentinel" and not path[0]):
        raise ConfigError(f"{masked(url)!r} is not a Redis URL: it lacks a host or, for Sentinel, /service")
    options: dict[str, Any] = {
        "username": unquote(user) or None,
        "password": unquote(password) or None,
        "ssl": scheme == "rediss",
    }
    if kind == "sentinel":
        options["db"] = db
    return _Target(kind, nodes, path[0], options)


def _single(kind: Any, url: str, options: dict[str, Any]) -> Any:
    """A client of one server, its URL's options checked; replies stay bytes whatever the URL says."""
    try:
        client = kind.from_url(url, **options)
        pool = client.connection_pool
        pool.connection_kwargs["decode_responses"] = options.get("decode_responses", False)
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{masked(url)!r} is not a Redis URL: {error}") from None
    return client


def check_url(url: str) -> None:
    """Refuse a URL that cannot be understood, without connecting.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    if _parse(url) is None:
        connect(url)


def connect(url: str, **options: Any) -> Any:
    """A synchronous client; ``options`` are redis-py's.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    options = {"retry": redis.retry.Retry(NoBackoff(), 0)} | _TIMEOUTS | options
    target = _parse(url)
    if target is None:
        return _single(redis.Redis, url, options)
    if target.kind == "sentinel":
        sentinel = redis.sentinel.Sentinel(target.hosts, sentinel_kwargs=_TIMEOUTS)
        return sentinel.master_for(  # pyright: ignore[reportUnknownMemberType]
            target.service, **target.options, **options
        )
    nodes = [redis.cluster.ClusterNode(host, port) for host, port in target.hosts]
    return redis.cluster.RedisCluster(startup_nodes=nodes, **target.options, **options)


def connect_async(url: str) -> Any:
    """An asynchronous client; it connects when first used.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    once = redis.asyncio.retry.Retry(NoBackoff(), 0)
    target = _parse(url)
    if target is None:
        return _single(redis.asyncio.Redis, url, {"retry": once} | _TIMEOUTS)
    if target.kind == "sentinel":
        sentinel = redis.asyncio.sentinel.Sentinel(target.hosts, sentinel_kwargs=_TIMEOUTS, **_TIMEOUTS)
        return sentinel.master_for(  # pyright: ignore[reportUnknownMemberType]
            target.service, retry=once, **target.options
        )
    nodes = [redis.asyncio.cluster.ClusterNode(host, port) for host, port in target.hosts]
    return redis.asyncio.cluster.RedisCluster(startup_nodes=nodes, retry=once, **target.options, **_TIMEOUTS)


def companions(client: Any) -> list[Any]:
    """Clients that redis-py made beside ``client`` and that it does not close: those of its Sentinels."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else manager.sentinels


def masked(url: str) -> str:
    """The URL without its password, for messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))
