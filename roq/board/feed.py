"""What a page is sent: where it begins, then the run's events, page by page.

One reader follows the stream in Redis for all browsers and keeps its newest events. A browser that is
further back reads its own pages from Redis; what has not been sent is nowhere kept for it, so one that
stands still costs nothing.
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

__all__ = ["ArchiveFeed", "Feed", "Message", "RunFeed", "config_of"]

RECENT = 20_000  # events that the one reader keeps for all browsers
PAGE = 1000  # events in one message at most
PACE_S = 0.05  # events of so long travel together
PULSE_S = 10.0  # a browser hears something at least so often
STATUS_S = 1.0  # how often the run's status is looked at while somebody watches
RETRY_S = 1.0  # after Redis failed
MOST_NUMBER = 2**64 - 1  # of the ids of one millisecond
TRIES = 20  # of a look at the whole run, at a moment between two events
CLOSE_S = 3.0  # for the reader to end


class Message(msgspec.Struct, frozen=True):
    """One server-sent event: ``begin``, ``events``, ``status``, ``trouble``, ``end``; ``pulse`` is a comment.

    ``id`` is the stream's id up to which the page knows the run once it has this message.
    """

    kind: str
    data: bytes = b"{}"
    id: str | None = None

    def encode(self) -> bytes:
        """As it goes over the wire."""
        if self.kind == "pulse":
            return b": still here\n\n"
        head = b"" if self.id is None else b"id: %s\n" % self.id.encode()
        return b"%sevent: %s\ndata: %s\n\n" % (head, self.kind.encode(), self.data)


class Feed(Protocol):
    """Where a page's messages come from."""

    def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """The messages for a page that knows everything up to the id ``after``; None for a new page."""
        ...

    async def start(self) -> None:
        """Begin to read."""
        ...

    async def stop(self) -> None:
        """End every ``messages`` and close what is open."""
        ...


def config_of(config: RunConfig) -> dict[str, Any]:
    """What the page needs of a run's configuration."""
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
    data = msgspec.json.encode([{"id": event.id, **event.fields} for event in page])
    return Message("events", data, page[-1].id)


class RunFeed:
    """The events of a run on a server, from its beginning (or from a picture of now) on and on."""

    def __init__(self, url: str, run: str, *, control: bool = False) -> None:
        self.run = run
        self._url = url
        self._control = control
        self._scheduler = AsyncScheduler(url, run, retry_s=2.0)
        self._client: Any = connect_async(url)
        self._operations = Operations(run)
        self._recent: list[Event] = []
        self._floor = self._newest = BEGINNING  # ids: before all of _recent, and of its last
        self._status: Message | None = None
        self._trouble: Message | None = None
        self._news = asyncio.Event()  # replaced by a new one whenever it is set
        self._watching = 0
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to read at the stream's newest event."""
        with contextlib.suppress(
            RoqError
        ):  # Redis is away: the reader begins at the beginning, and tells of it
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

    # ---- the one reader ----------------------------------------------------------------------------

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
        if page[0].name == "gap":  # trimmed before it was read: who misses them begins again
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
        """The run's status, for those who watch now."""
        while not self._stopped:
            await asyncio.sleep(STATUS_S)
            if self._watching:
                with contextlib.suppress(RoqError):  # the reader tells of it
                    status = await self._scheduler.status()
                    self._status = Message("status", msgspec.json.encode(status))
                    self._tell()

    async def _failed(self, error: RoqError) -> None:
        self._trouble = Message("trouble", msgspec.json.encode({"message": str(error)}))
        self._tell()
        await asyncio.sleep(RETRY_S)

    # ---- one page ----------------------------------------------------------------------------------

    async def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """The messages for one page, without end."""
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
                    yield Message("trouble", msgspec.json.encode({"message": str(error)}))
                    await asyncio.sleep(RETRY_S)
        finally:
            self._watching -= 1

    async def _go_on(self, after: str) -> AsyncGenerator[Message]:
        """Messages after an id, until the events that follow it are gone."""
        told: tuple[Message | None, Message | None] = (None, None)
        while not self._stopped:
            news = self._news
            page = await self._page(after)
            if page and page[0].name == "gap":
                return
            read = len(page)
            if page:
                message = _events(page)
                del page  # a browser that stands still keeps the message waiting, and nothing else
                after = message.id or after
                yield message
            standing = (self._trouble, self._status)
            for message, before in zip(standing, told, strict=True):
                if message is not before:
                    yield message or Message("trouble")  # without a message: it is over
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

    # ---- where a page begins -----------------------------------------------------------------------

    async def _ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands together; others' may come between them, since who only looks has no transactions."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()
        except (RedisError, OSError) as error:
            raise translate(error, self._url) from error

    async def _last_id(self) -> str:
        """The id of the newest event that the stream has ever had."""
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
        return Message(
            "begin",
            msgspec.json.encode(
                {
                    "run": self.run,
                    "config": config_of(config),
                    "live": True,
                    "control": self._control,
                    "picture": begun,
                }
            ),
            at,
        )

    async def _look_at_once(self) -> tuple[str, Snapshot]:
        """All of the run, and the newest event that it is the outcome of."""
        newest = ("XREVRANGE", self._operations.keys["events"], "+", "-", "COUNT", 1)
        look = self._operations.wire(Call(functions.VERIFY, ()))
        for _ in range(TRIES):
            before, reply, after = await self._ask(newest, look, newest)
            if before == after:
                return after[0][0].decode(), Snapshot(reply)
        raise RoqError(f"in {TRIES} tries the run changed while it was looked at; the board tries again")

    async def _publishes(self, until: str) -> list[Event]:
        """The publish events that the trimmed stream still has."""
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
    """The events of an archive (``roq events --archive``), once through. Nothing of it is kept in memory.

    Args:
        path: the file.
        config: the run's configuration, for an archive that does not begin with it.

    Raises:
        ConfigError: the file cannot be read, or nobody knows the run's configuration.
    """

    def __init__(self, path: Path, config: RunConfig | None = None) -> None:
        self._path = path
        found = archived_config(read_archive(path)) or config
        if found is None:
            raise ConfigError(f"{path} does not begin with the run's configuration; name the run beside it")
        self._config = found
        head = next(iter(read_archive(path)))
        self.run = head.get("run", path.stem)
        self._stopped = False

    async def start(self) -> None:
        """Nothing: each page reads for itself."""

    async def stop(self) -> None:
        """End every ``messages``."""
        self._stopped = True

    async def messages(self, after: str | None) -> AsyncGenerator[Message]:
        """The archive's events, then ``end``."""
        if after is None:
            begin = {"run": self.run, "config": config_of(self._config), "live": False, "control": False}
            yield Message("begin", msgspec.json.encode(begin | {"picture": None}), BEGINNING)
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
