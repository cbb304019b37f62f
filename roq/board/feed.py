"""The messages for a page: its starting point, then the run's events in batches.

One reader follows the stream in Redis for all browsers and keeps the newest events. A browser that is further
behind reads from Redis. Nothing is queued per browser, so a stalled one costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from redis.exceptions import RedisError

from roq.board.picture import picture
from roq.client.async_scheduler import AsyncScheduler
from roq.client.connect import connect_async, sentinels_of
from roq.client.failures import translate
from roq.client.operations import Call, Operations
from roq.config import RunConfig
from roq.errors import ConfigError, RoqError
from roq.events.archive import archived_config, read_archive
from roq.events.event import BEGINNING, Event, id_order
from roq.protocol import functions
from roq.protocol.snapshot import Snapshot
from roq.text import printable_values

__all__ = ["ArchiveFeed", "Feed", "Message", "RunFeed", "config_of"]

RECENT = 20_000  # events kept in memory for all browsers
PAGE = 1000  # most events in one message
PACE_S = 0.05  # events within this time are sent together
PULSE_S = 10.0  # keep-alive interval
STATUS_S = 1.0  # status refresh interval while a page is open
RETRY_S = 1.0  # after a Redis failure
MOST_NUMBER = 2**64 - 1  # of ids within one millisecond
TRIES = 20  # attempts to read the whole run between two events
CLOSE_S = 3.0  # how long to wait for the reader to end


class Message(msgspec.Struct, frozen=True):
    """One server-sent event: ``begin``, ``events``, ``status``, ``trouble``, ``end``; ``pulse`` is a comment.

    ``id`` is the id of the newest event that the page knows after this message.
    """

    kind: str
    data: bytes = b"{}"
    id: str | None = None

    @classmethod
    def of(cls, kind: str, value: object, id: str | None = None) -> Message:  # noqa: A002
        """A message of JSON, its text made printable: a page shows what others wrote."""
        return cls(kind, msgspec.json.encode(printable_values(msgspec.to_builtins(value))), id)

    def encode(self) -> bytes:
        """Encode in the wire format."""
        if self.kind == "pulse":
            return b": still here\n\n"
        head = b"" if self.id is None else b"id: %s\n" % self.id.encode()
        return b"%sevent: %s\ndata: %s\n\n" % (head, self.kind.encode(), self.data)


class Feed(Protocol):
    """A source of a page's messages."""

    def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """Yield messages for a page that knows all events up to the id ``after``; None for a new page."""
        ...

    async def start(self) -> None:
        """Start reading."""
        ...

    async def stop(self) -> None:
        """End every ``messages`` and close connections."""
        ...


def config_of(config: RunConfig) -> dict[str, Any]:
    """Return the part of the configuration that the page needs."""
    return {
        "eta": config.eta,
        "batch_size": config.batch_size,
        "slots": config.slots,
        "group_size": config.group_size,
        "total_steps": config.total_steps,
        "prompts": config.prompts,
        "epochs": config.epochs,
    }


def _events(page: list[Event]) -> Message:
    return Message.of("events", [{"id": event.id, **event.fields} for event in page], page[-1].id)


class RunFeed:
    """The events of a run on a server, from its creation or from a picture of its current state."""

    def __init__(self, url: str, run: str, *, control: bool = False) -> None:
        self.run = run
        self._url = url
        self._control = control
        self._scheduler = AsyncScheduler(url, run, retry_s=2.0)
        self._client: Any = connect_async(url)
        self._operations = Operations(run)
        self._recent: list[Event] = []
        self._floor = self._newest = BEGINNING  # ids: just before _recent, and of its last
        self._status: Message | None = None
        self._trouble: Message | None = None
        self._news = asyncio.Event()  # replaced whenever it is set
        self._watching = 0
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start reading at the stream's newest event."""
        with contextlib.suppress(RoqError):  # Redis is down: the reader starts from 0-0 and reports it
            self._floor = self._newest = await self._last_id()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._look())]

    async def stop(self) -> None:
        """End every ``messages`` and close the connections."""
        self._stopped = True
        self._tell()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self._scheduler.aclose()
        for client in (self._client, *sentinels_of(self._client)):
            await client.aclose()

    # ---- the shared reader -------------------------------------------------------------------------

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _read(self) -> None:
        while not self._stopped:
            try:
                page = await self._scheduler.events(self._newest, wait_s=2.0)
            except RoqError as error:
                await self._failed(error)
                continue
            if self._trouble is not None:
                self._trouble = None
                self._tell()
            if page:
                self._keep(page)

    def _keep(self, page: list[Event]) -> None:
        if page[0].name == "gap":  # trimmed before they were read: pages that miss them start over
            self._recent, page = [], page[1:]
            if not page:
                return
            time, number = id_order(page[0].id)
            self._floor = f"{time}-{number - 1}" if number else f"{time - 1}-{MOST_NUMBER}"
        self._recent += page
        self._newest = page[-1].id
        if len(self._recent) > RECENT:
            cut = len(self._recent) - RECENT // 2
            self._floor = self._recent[cut - 1].id
            del self._recent[:cut]
        self._tell()

    async def _look(self) -> None:
        """Refresh the run's status while pages are open."""
        while not self._stopped:
            await asyncio.sleep(STATUS_S)
            if self._watching:
                with contextlib.suppress(RoqError):  # the reader reports it
                    status = await self._scheduler.status()
                    self._status = Message.of("status", status)
                    self._tell()

    async def _failed(self, error: RoqError) -> None:
        self._trouble = Message.of("trouble", {"message": str(error)})
        self._tell()
        await asyncio.sleep(RETRY_S)

    # ---- one page ----------------------------------------------------------------------------------

    async def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """Yield the messages for one page, indefinitely."""
        self._watching += 1
        try:
            while not self._stopped:
                try:
                    if after is None or id_order(after) > id_order(await self._last_id()):
                        beginning = await self._begin()
                        after = beginning.id or BEGINNING
                        yield beginning
                    async for message in self._go_on(after):
                        after = message.id or after
                        yield message
                    after = None
                except RoqError as error:
                    yield Message.of("trouble", {"message": str(error)})
                    await asyncio.sleep(RETRY_S)
        finally:
            self._watching -= 1

    async def _go_on(self, after: str) -> AsyncGenerator[Message]:
        """Yield messages after an id, until the following events were trimmed."""
        told: tuple[Message | None, Message | None] = (None, None)
        while not self._stopped:
            news = self._news
            page = await self._page(after)
            if page and page[0].name == "gap":
                return
            read = len(page)
            if page:
                message = _events(page)
                del page  # a stalled browser blocks here, holding only this message
                after = message.id or after
                yield message
            standing = (self._trouble, self._status)
            for message, before in zip(standing, told, strict=True):
                if message is not before:
                    yield message or Message("trouble")  # no message: the feed has stopped
            told = standing
            if read == PAGE:
                continue
            if read:
                await asyncio.sleep(PACE_S)
                continue
            try:
                await asyncio.wait_for(news.wait(), PULSE_S)
            except TimeoutError:
                yield Message("pulse")

    async def _page(self, after: str) -> list[Event]:
        if id_order(after) < id_order(self._floor):
            return await self._scheduler.events(after)
        low, high = 0, len(self._recent)
        wanted = id_order(after)
        while low < high:
            middle = (low + high) // 2
            if id_order(self._recent[middle].id) > wanted:
                high = middle
            else:
                low = middle + 1
        return self._recent[low : low + PAGE]

    # ---- a page's starting point -------------------------------------------------------------------

    async def _ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands in a pipeline, without a transaction: a read-only user may not use one."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()
        except (RedisError, OSError) as error:
            raise translate(error, self._url) from error

    async def _last_id(self) -> str:
        """Return the id of the newest event ever added to the stream."""
        (newest,) = await self._ask(("XREVRANGE", self._operations.keys["events"], "+", "-", "COUNT", 1))
        return newest[0][0].decode() if newest else BEGINNING

    async def _begin(self) -> Message:
        config = await self._scheduler.config()
        events = self._operations.keys["events"]
        (first,) = await self._ask(("XRANGE", events, "-", "+", "COUNT", 1))
        at, begun = BEGINNING, None
        if first and first[0][1].get(b"event") != b"created":
            at, look = await self._look_at_once()
            begun = picture(look, await self._publishes(at))
        begin = {"run": self.run, "config": config_of(config), "live": True, "control": self._control}
        return Message.of("begin", begin | {"picture": begun}, at)

    async def _look_at_once(self) -> tuple[str, Snapshot]:
        """Read the complete state, and the id of the newest event included in it."""
        newest = ("XREVRANGE", self._operations.keys["events"], "+", "-", "COUNT", 1)
        look = self._operations.wire(Call(functions.VERIFY, ()))
        for _ in range(TRIES):
            before, reply, after = await self._ask(newest, look, newest)
            if before == after:
                return after[0][0].decode(), Snapshot(reply)
        raise RoqError(f"the run changed during each of {TRIES} attempts to read its state; retrying")

    async def _publishes(self, until: str) -> list[Event]:
        """Return the publish events left in the trimmed stream."""
        found: list[Event] = []
        after = BEGINNING
        while id_order(after) < id_order(until):
            page = await self._scheduler.events(after)
            if not page:
                break
            after = page[-1].id
            found += [e for e in page if e.name == "publish" and id_order(e.id) <= id_order(until)]
        return found


class ArchiveFeed:
    """The events of an archive (``roq events --archive``), streamed from the file.

    Args:
        path: the file.
        config: the run's configuration, for an archive that does not start with it.

    Raises:
        ConfigError: the file cannot be read, or the run's configuration is missing.
    """

    def __init__(self, path: Path, config: RunConfig | None = None) -> None:
        self._path = path
        found = archived_config(read_archive(path)) or config
        if found is None:
            raise ConfigError(f"{path} does not start with a configuration; also pass --redis and --run")
        self._config = found
        head = next(iter(read_archive(path)))
        self.run = head.get("run", path.stem)
        self._stopped = False

    async def start(self) -> None:
        """Do nothing: each page reads the file itself."""

    async def stop(self) -> None:
        """End every ``messages``."""
        self._stopped = True

    async def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """Yield the archive's events, then ``end``."""
        if after is None:
            begin = {"run": self.run, "config": config_of(self._config), "live": False, "control": False}
            yield Message.of("begin", begin | {"picture": None}, BEGINNING)
        known = id_order(after or BEGINNING)
        events = read_archive(self._path)
        while not self._stopped:
            page = await asyncio.to_thread(partial(_next_page, events, known))
            if not page:
                yield Message("end")
                return
            yield _events(page)


def _next_page(events: Iterator[Event], known: tuple[int, int]) -> list[Event]:
    new = (event for event in events if event.name != "archive" and id_order(event.id) > known)
    return list(itertools.islice(new, PAGE))
