"""From a URL to a redis-py client: one server, a master that Sentinels watch, or a cluster.

- ``redis://``, ``rediss://``, ``unix://``: one server.
- ``redis+sentinel://[user:password@]host[:26379],host…/service[/db]``: the current master of ``service``.
- ``redis+cluster://[user:password@]host[:6379],host…``: a cluster; all keys of a run are in one slot.

Append ``s`` to ``redis`` for TLS. Any of them takes these query parameters:

- ``username``, ``password_file``: the login; the file holds only the password.
- ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``: PEM files: the CA to trust, the client's own pair.
- ``ssl_check_hostname``: ``false`` when the server's certificate names another host.
- ``sentinel_username``, ``sentinel_password_file``: the login for the Sentinels.

The clients made here never retry; that is left to the caller.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

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

__all__ = ["check_url", "connect", "connect_async", "masked", "own_address", "sentinels_of", "tls_trouble"]

SOCKET_TIMEOUT_S = 5.0
_TIMEOUTS: dict[str, Any] = {
    "socket_timeout": SOCKET_TIMEOUT_S,
    "socket_connect_timeout": SOCKET_TIMEOUT_S,
}
_SHORTEST_TIMEOUT_S = 2.5  # longer than a blocking read (_BLOCK_S in roq/client/operations/observe.py)
# The default of redis-py, 100, would fail more waits than that as if the server were away.
_OPTIONS: dict[str, Any] = _TIMEOUTS | {"max_connections": 10_000}
# Options of redis-py that roq sets itself: with others, replies or retries would not be as it expects them.
_RESERVED = (
    "protocol",
    "legacy_responses",
    "encoding",
    "encoding_errors",
    "max_connections",
    "timeout",
    "retry_on_timeout",
    "retry_on_error",
    "single_connection_client",
)
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "password_file", "sentinel_password_file")
_PARAMETERS = ("username", "sentinel_username", "ssl_check_hostname", *_FILES)
# Permanent handshake failures; any other failure of a TLS connection is transient.
_TLS_TROUBLE = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted; pass the CA that signed it as ssl_ca_certs",
    "WRONG_VERSION_NUMBER": "it does not speak TLS on this port; use redis:// or its TLS port",
    "CERTIFICATE_REQUIRED": "it requires a client certificate; pass ssl_certfile and ssl_keyfile",
    "UNKNOWN_CA": "it does not trust the client certificate; pass one signed by its CA as ssl_certfile",
}


class _Target(msgspec.Struct, frozen=True):
    """Where a URL points.

    Attributes:
        kind: "single", "sentinel" or "cluster".
        url: of a single server, without the parameters that became options.
        hosts, service: of Sentinels or of a cluster.
        options: redis-py options of the connection for commands.
        sentinel_options: redis-py options of the connections to the Sentinels.
    """

    kind: str
    url: str
    hosts: list[tuple[str, int]]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def _parse(url: str) -> _Target:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unlike(url, "it cannot be parsed; percent-encode special characters") from None
    if "\0" in unquote(url):
        raise _unlike(url, "it contains a NUL character")
    given: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _PARAMETERS:
            given[name] = value
        else:
            others.append((name, value))
            _check_option(url, name, value)
    scheme, _, kind = parts.scheme.partition("+")
    options, sentinel_options = _options(url, given, tls=scheme == "rediss")
    if not kind:
        bare = url.partition("?")[0] + (f"?{urlencode(others)}" if others else "")
        return _Target("single", bare, [], "", options, {})
    if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise _unlike(url, "use redis+sentinel://… or redis+cluster://…")
    if others:
        raise _unlike(url, f"unknown parameter {others[0][0]!r}; valid ones are {', '.join(_PARAMETERS)}")
    account, _, hosts = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    path = parts.path.strip("/").split("/")
    default = 26379 if kind == "sentinel" else 6379
    try:
        pairs = [node.partition(":") for node in hosts.split(",")]
        nodes = [(host, int(port or default)) for host, _, port in pairs]
        db = int(path[1]) if len(path) > 1 else 0
    except ValueError:
        raise _unlike(url, "ports and the database must be numbers") from None
    if not all(host for host, _ in nodes) or (kind == "sentinel" and not path[0]):
        raise _unlike(url, "it lacks a host or, for Sentinel, /service")
    login = {"username": unquote(user) or None, "password": unquote(password) or None}
    options = login | {"ssl": scheme == "rediss"} | options
    if kind == "sentinel":
        options["db"] = db
    return _Target(kind, "", nodes, path[0], options, sentinel_options)


def _check_option(url: str, name: str, value: str) -> None:
    if name in _RESERVED:
        raise _unlike(url, f"roq sets {name} itself; remove it")
    if name == "socket_timeout":
        try:
            enough = float(value) >= _SHORTEST_TIMEOUT_S
        except ValueError:
            enough = False
        if not enough:
            raise _unlike(url, f"socket_timeout must be at least {_SHORTEST_TIMEOUT_S} (seconds)")


def _options(url: str, given: dict[str, str], *, tls: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The redis-py options from the query parameters: for the server, and for the Sentinels."""
    for name in _FILES:
        if name in given and not Path(given[name]).is_file():
            raise ConfigError(f"{name} = {given[name]!r} in the server's URL is not a file; correct the path")
    shared: dict[str, Any] = {name: value for name, value in given.items() if name.startswith("ssl_")}
    if shared and not tls:
        raise _unlike(url, f"{next(iter(shared))} needs TLS; start the URL with rediss")
    if "ssl_check_hostname" in shared:
        if shared["ssl_check_hostname"] not in ("true", "false"):
            raise _unlike(url, "ssl_check_hostname must be true or false")
        shared["ssl_check_hostname"] = shared["ssl_check_hostname"] == "true"
    if "ssl_ca_certs" in shared or "ssl_certfile" in shared:
        _check_certificates(shared)
    options, sentinel = dict(shared), dict(shared) | ({"ssl": True} if tls else {})
    for out, prefix in ((options, ""), (sentinel, "sentinel_")):
        if f"{prefix}username" in given:
            out["username"] = given[f"{prefix}username"]
        if f"{prefix}password_file" in given:
            out["password"] = _secret(Path(given[f"{prefix}password_file"]))
    return options, sentinel


def _secret(path: Path) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        kind = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the password file {path} cannot be read: {kind}") from None
    if not secret:
        raise ConfigError(f"the password file {path} is empty; write the password into it")
    return secret


def _check_certificates(files: dict[str, Any]) -> None:
    """Check PEM files now: redis-py would report an unreadable one as an unreachable server."""
    context = ssl.create_default_context()
    name = ""
    try:
        if "ssl_ca_certs" in files:
            name = "ssl_ca_certs"
            context.load_verify_locations(files[name])
        if "ssl_certfile" in files:
            name = "ssl_certfile"
            context.load_cert_chain(files[name], files.get("ssl_keyfile"))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{name} = {files[name]!r} in the server's URL cannot be used: {error}") from None


def _unlike(url: str, why: str) -> ConfigError:
    return ConfigError(f"{masked(url)!r} is not a Redis URL: {why}")


def _single(kind: Any, url: str, options: dict[str, Any]) -> Any:
    """Make a client of one server and check the URL's options; only ``options`` can decode replies."""
    target = _parse(url)
    try:
        client = kind.from_url(target.url, **options, **target.options)
        pool = client.connection_pool
        pool.connection_kwargs["decode_responses"] = options.get("decode_responses", False)
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        raise _unlike(url, str(error)) from None
    except ValueError as error:
        if masked(url) == url:
            raise _unlike(url, str(error)) from None
        # The error may quote part of a password that has a special character, as a "port".
        raise _unlike(url, "percent-encode its password's special characters, or use password_file") from None
    return client


def check_url(url: str) -> None:
    """Reject an invalid URL, without connecting.

    Raises:
        ConfigError: the URL is invalid, or a file that it names cannot be used.
    """
    if _parse(url).kind == "single":
        connect(url)


def connect(url: str, **options: Any) -> Any:
    """Make a synchronous client; ``options`` are redis-py's.

    Raises:
        ConfigError: the URL is invalid, or a file that it names cannot be used.
    """
    options = {"retry": redis.retry.Retry(NoBackoff(), 0)} | _OPTIONS | options
    target = _parse(url)
    if target.kind == "single":
        return _single(redis.Redis, url, options)
    if target.kind == "sentinel":
        sentinel = redis.sentinel.Sentinel(target.hosts, sentinel_kwargs=_TIMEOUTS | target.sentinel_options)
        return sentinel.master_for(  # pyright: ignore[reportUnknownMemberType]
            target.service, **target.options, **options
        )
    nodes = [redis.cluster.ClusterNode(host, port) for host, port in target.hosts]
    return redis.cluster.RedisCluster(startup_nodes=nodes, **target.options, **options)


def connect_async(url: str) -> Any:
    """Make an asynchronous client; it connects on first use.

    Raises:
        ConfigError: the URL is invalid, or a file that it names cannot be used.
    """
    once = redis.asyncio.retry.Retry(NoBackoff(), 0)
    target = _parse(url)
    if target.kind == "single":
        return _single(redis.asyncio.Redis, url, {"retry": once} | _OPTIONS)
    if target.kind == "sentinel":
        sentinel = redis.asyncio.sentinel.Sentinel(
            target.hosts, sentinel_kwargs=_TIMEOUTS | target.sentinel_options, **_OPTIONS
        )
        return sentinel.master_for(  # pyright: ignore[reportUnknownMemberType]
            target.service, retry=once, **target.options
        )
    nodes = [redis.asyncio.cluster.ClusterNode(host, port) for host, port in target.hosts]
    return redis.asyncio.cluster.RedisCluster(startup_nodes=nodes, retry=once, **target.options, **_OPTIONS)


def sentinels_of(client: Any) -> list[Any]:
    """The Sentinel clients that redis-py made for ``client``; closing it does not close them."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else manager.sentinels


def own_address(url: str) -> str:
    """This host's address on the network that leads to the server. Nothing is sent.

    Raises:
        ConfigError: the URL is invalid, or none of its host names resolves.
    """
    target = _parse(url)
    for host, port in target.hosts or [_host_of(target.url)]:
        if not host:
            return "127.0.0.1"
        with suppress(OSError):
            family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                own: str = probe.getsockname()[0]
                return "127.0.0.1" if own == "::1" else own
    raise ConfigError(f"no host of {masked(url)} resolves; start the trainer with --address")


def _host_of(url: str) -> tuple[str, int]:
    """The host and port of a single server; the host is empty for a unix socket."""
    parts = urlsplit(url)
    return ("", 0) if parts.scheme == "unix" else (parts.hostname or "localhost", parts.port or 6379)


def tls_trouble(error: BaseException) -> str | None:
    """The reason that a TLS handshake can never succeed; None for any other error."""
    text = str(error)
    return next((why for code, why in _TLS_TROUBLE.items() if code in text), None)


def masked(url: str) -> str:
    """The URL without its passwords, for messages; the URL may be invalid."""
    url = re.sub(r"^([^:/?#]+://[^:@/?#]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"([?&](?:\w*_)?password=)[^&#]*", r"\1***", url)
