"""The board's web server: static files, the event stream, and four control actions if allowed."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roq.board.feed import Feed
from roq.client.async_scheduler import AsyncScheduler
from roq.errors import ConfigError, Invalid, NotAllowed, NotReady, RoqError, UnknownGroup, UnknownWorker
from roq.events.fields import is_id

__all__ = ["CONTROL_HEADER", "accepted_hosts", "bind", "is_loopback", "make_app", "serve"]

CONTROL_HEADER = "X-Roq-Board"
"""A page of another site can only send it after a CORS preflight, which the server refuses."""

REASON = "by hand, on the board"
MOST_BODY = 4096  # bytes in a request; all actions are small

_STATIC = Path(str(resources.files("roq.board") / "static"))
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+?)\.?)(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def accepted_hosts(address: str, names: Iterable[str] = ()) -> frozenset[str]:
    """The names and addresses under which a board on ``address`` answers: loopback's, its own, and ``names``.

    Raises:
        ConfigError: one of ``names`` is neither a host name nor an address.
    """
    hosts = {"localhost", "127.0.0.1", "::1"}
    for name in names:
        host = _host(f"[{name}]" if ":" in name else name)
        if host is None:
            raise ConfigError(f"{name!r} is not a host name or an address; leave out scheme and port")
        hosts.add(host)
    own = _host(f"[{address}]" if ":" in address else address)
    return frozenset(hosts if own is None or _is_wildcard(own) else {*hosts, own})


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _host(header: str) -> str | None:
    """The host of a ``Host`` header without its port, one spelling for each; None for what is not one."""
    given = _HOST.fullmatch(header)
    if given is None:
        return None
    name = (given[1] or given[2]).lower()
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name))
    return None if given[1] else name


class _Guard:
    """Sets the security headers; refuses requests under a name that is not one of ``hosts``.

    Without the latter, a page of another site could point its own name at the board's address (DNS rebinding)
    and read the run.
    """

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        host = _host(given[0]) if len(given) == 1 else None

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        if host not in self._hosts:
            text = f"this board does not answer to the host {host or 'of this request'}; see --allow-host\n"
            await PlainTextResponse(text, 421)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class _Drop(msgspec.Struct, forbid_unknown_fields=True):
    group: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # the library's range of numbers


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class _TooLong(Exception):
    """A request's body exceeds :data:`MOST_BODY`."""


def make_app(feed: Feed, scheduler: AsyncScheduler | None, *, hosts: frozenset[str]) -> Starlette:
    """Create the application.

    Args:
        feed: the source of the pages' messages.
        scheduler: controls the run; None for a read-only board.
        hosts: the names under which it answers (:func:`accepted_hosts`).
    """

    async def index(_request: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        if after is not None and not is_id(after, or_time=True):
            return PlainTextResponse("'after' is not an event id\n", 400)

        async def body() -> AsyncGenerator[bytes]:
            yield b"retry: 1000\n\n"
            async with contextlib.aclosing(feed.messages(after)) as messages:
                async for message in messages:
                    yield message.encode()

        return StreamingResponse(
            body(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    def steering(act: Callable[[AsyncScheduler, bytes], Awaitable[object]]) -> Route:
        async def endpoint(request: Request) -> Response:
            if scheduler is None:
                return _refusal(403, "this board is read-only; start it with --allow-control")
            if not _from_our_page(request):
                return _refusal(403, "only the board's own page may control the run")
            try:
                return JSONResponse({"done": await act(scheduler, await _body(request))})
            except _TooLong:
                return _refusal(413, f"the request is longer than {MOST_BODY} bytes")
            except msgspec.DecodeError as error:
                return _refusal(400, f"invalid request: {error}")
            except Invalid as error:
                return _refusal(400, str(error))
            except NotAllowed as error:
                return _refusal(403, str(error))
            except (UnknownGroup, UnknownWorker) as error:
                return _refusal(404, str(error))
            except NotReady as error:
                return _refusal(409, str(error))
            except RoqError as error:
                return _refusal(503, str(error))

        return Route(f"/api/{act.__name__}", endpoint, methods=["POST"])

    async def pause(run: AsyncScheduler, _body: bytes) -> None:
        await run.pause(REASON)

    async def resume(run: AsyncScheduler, _body: bytes) -> None:
        await run.resume(REASON)

    async def drop(run: AsyncScheduler, body: bytes) -> str:
        asked = msgspec.json.decode(body, type=_Drop)
        return f"the prompt of group {asked.group} is {(await run.drop(asked.group, REASON)).status}"

    async def drain(run: AsyncScheduler, body: bytes) -> str:
        asked = msgspec.json.decode(body, type=_Drain)
        claims = await run.drain(asked.worker, REASON)
        return f"worker {asked.worker} leaves when its {claims} trajectories are done"

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        await feed.start()
        yield
        await feed.stop()
        if scheduler is not None:
            await scheduler.aclose()

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/api/events", events),
            *map(steering, (pause, resume, drop, drain)),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        lifespan=lifespan,
    )
    app.add_middleware(_Guard, hosts=hosts)
    return app


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _body(request: Request) -> bytes:
    """Read the request's body, up to the limit.

    Raises:
        _TooLong: the body is longer.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise _TooLong
    return bytes(body)


def _from_our_page(request: Request) -> bool:
    """Return whether a request comes from this server's page, according to the browser's headers."""
    host = request.headers.get("host")
    return (
        request.headers.get(CONTROL_HEADER) == "control"
        and request.headers.get("origin") in (f"http://{host}", f"https://{host}")  # https: behind a proxy
        and request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    )


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 lets the system choose.

    Raises:
        ConfigError: the address is not available.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}; try --port 0") from None


class _Server(uvicorn.Server):
    """A server that ends the event streams before it waits for connections to close."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._feed.stop()
        await super().shutdown(sockets)


def serve(
    feed: Feed, scheduler: AsyncScheduler | None, listener: socket.socket, *, hosts: frozenset[str]
) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        make_app(feed, scheduler, hosts=hosts),
        log_level="warning",
        timeout_graceful_shutdown=3,
        server_header=False,
    )
    _Server(config, feed).run(sockets=[listener])
