"""The board's web server: files, the stream of events, and (when allowed) four ways to steer the run."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
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

__all__ = ["CONTROL_HEADER", "bind", "is_loopback", "make_app", "serve"]

CONTROL_HEADER = "X-Roq-Board"
"""A page of another site cannot send it without asking first, and is then refused."""

REASON = "by hand, on the board"
MOST_BODY = 4096  # bytes of a request: what is asked of a run is small

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
    """Whether only this machine can reach a server on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Guard:
    """Sets the security headers; on a loopback address, refuses requests under any other name.

    Without the latter, a page of another site could point a name of its own at 127.0.0.1 and read the run.
    """

    def __init__(self, app: ASGIApp, *, local: bool) -> None:
        self._app = app
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = Headers(scope=scope).getlist("host")
        given = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        name = "" if given is None else (given[1] or given[2]).lower()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        if self._local and not is_loopback(name):
            refused = PlainTextResponse(f"this board answers to localhost, not to {name or 'this'}\n", 421)
            await refused(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class _Drop(msgspec.Struct, forbid_unknown_fields=True):
    group: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # as the library's numbers


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class _TooLong(Exception):
    """A request's body is longer than anything that the page sends."""


def make_app(feed: Feed, scheduler: AsyncScheduler | None, *, local: bool) -> Starlette:
    """The application.

    Args:
        feed: what pages are sent.
        scheduler: steers the run; None for a board that may only look.
        local: the server is on a loopback address.
    """

    async def index(_request: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        if after is not None and not is_id(after, or_time=True):
            return PlainTextResponse("'after' is no id of an event\n", 400)

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
                return _refusal(403, "this board only looks; start it with --allow-control to steer the run")
            if not _from_our_page(request):
                return _refusal(403, "only the board's own page may steer the run")
            try:
                return JSONResponse({"done": await act(scheduler, await _body(request))})
            except _TooLong:
                return _refusal(413, f"the request is longer than {MOST_BODY} bytes; no action needs as many")
            except msgspec.DecodeError as error:
                return _refusal(400, f"the request is not understood: {error}")
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
    app.add_middleware(_Guard, local=local)
    return app


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _body(request: Request) -> bytes:
    """The request's body, of which no more is read than may be there.

    Raises:
        _TooLong: there is more.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise _TooLong
    return bytes(body)


def _from_our_page(request: Request) -> bool:
    """Whether a request comes from the page that this server sent, by the browser's own word."""
    host = request.headers.get("host")
    return (
        request.headers.get(CONTROL_HEADER) == "control"
        and request.headers.get("origin") in (f"http://{host}", f"https://{host}")  # https: a proxy before it
        and request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}; try --port 0") from None


class _Server(uvicorn.Server):
    """Ends the streams of events before it waits for connections to close."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._feed.stop()
        await super().shutdown(sockets)


def serve(feed: Feed, scheduler: AsyncScheduler | None, listener: socket.socket, *, local: bool) -> None:
    """Serve until the process is told to stop (SIGINT, SIGTERM)."""
    config = uvicorn.Config(
        make_app(feed, scheduler, local=local),
        log_level="warning",
        timeout_graceful_shutdown=3,
        server_header=False,
    )
    _Server(config, feed).run(sockets=[listener])
