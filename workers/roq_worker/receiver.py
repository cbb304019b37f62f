"""The worker's side of weights that the trainer sends: the connection over which they are asked for.

The tensors themselves come to the engine's ranks (weight_transfer.py). Everything here fails as
:class:`TransferFailed`, and then the files are read instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from roq.errors import SenderSilent, TransferFailed
from roq.weights import messages

__all__ = ["Place", "Receiver"]

CONNECT_S = 10.0
OFFER_S = 15.0  # for an answer; one that waits for its turn is told so every few seconds
AVOID_S = 60.0  # a sender that does not answer is not asked again for so long
DONE_S = 30.0  # after the last byte


@dataclass
class Place:
    """Where an engine's ranks meet the trainer's sender.

    Attributes:
        backend, port, name: as :class:`roq.weights.messages.Meeting` says.
        host: the sender's.
        size: of the group: the ranks and the sender.
        address: of this host on the network that leads to the sender.
    """

    backend: str
    host: str
    port: int
    name: str
    size: int
    address: str


class Receiver:
    """A connection to the sender of the moment; it is opened when weights are asked for, and kept.

    Args:
        ranks: how many the engine has.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sender = ""
        self._silent, self._avoid_until = "", 0.0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @contextmanager
    def watched(self, sender: str) -> Iterator[None]:
        """While a sender is asked: a failure ends the connection, and a silent one is then left alone.

        Raises:
            TransferFailed: it did not answer a moment ago.
        """
        if sender == self._silent and time.monotonic() < self._avoid_until:
            raise TransferFailed("the trainer's sender did not answer a moment ago")
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, SenderSilent):
                self._silent, self._avoid_until = sender, time.monotonic() + AVOID_S
            raise

    async def connect(self, sender: str) -> Place | None:
        """Connect, unless there is a connection to this sender.

        Returns:
            Where the engine's ranks must meet it before anything else is asked; None if they have.

        Raises:
            TransferFailed: it is not reached.
        """
        if sender == self._sender:
            return None
        self.close()
        host, port, secret = messages.split_address(sender)
        self._reader, self._writer = await _open(host, port)
        messages.notice_death(self._writer.get_extra_info("socket"))
        meeting = await self._ask(messages.Hello(secret, self._ranks), messages.Meeting, CONNECT_S)
        if meeting.error:
            raise TransferFailed(meeting.error)
        _, probe = await _open(host, meeting.port)  # the engine stands still while its ranks try
        probe.close()
        self._sender = sender
        here = self._writer.get_extra_info("sockname")[0]
        return Place(meeting.backend, host, meeting.port, meeting.name, self._ranks + 1, here)

    async def offer(self, location: str) -> messages.Offer:
        """What will come of the weights at ``location``, or why they will not.

        Raises:
            TransferFailed: there is no answer.
        """
        offer = await self._ask(messages.Ask(_name(location)), messages.Offer, OFFER_S)
        while offer.queued:
            offer = await self._read(messages.Offer, OFFER_S)
        return offer

    def go(self) -> None:
        """The engine is about to receive."""
        assert self._writer is not None
        self._writer.write(messages.encode(messages.Go()))

    async def done(self) -> None:
        """Everything was received: hear the sender say the same, or leave it."""
        try:
            await self._read(messages.Done, DONE_S)
        except TransferFailed:
            self.close()

    async def _ask(self, message: msgspec.Struct, kind: type[Any], limit_s: float) -> Any:
        assert self._writer is not None
        self._writer.write(messages.encode(message))
        return await self._read(kind, limit_s)

    async def _read(self, kind: type[Any], limit_s: float) -> Any:
        assert self._reader is not None
        try:
            async with asyncio.timeout(limit_s):
                return messages.decode(await self._reader.readline(), kind)
        except TimeoutError:
            raise SenderSilent(f"the trainer's sender said nothing within {limit_s:g} s") from None
        except (OSError, ValueError, TransferFailed) as error:
            raise TransferFailed(f"the trainer's sender ended the connection: {error}") from None

    def close(self) -> None:
        """Leave the sender; the next offer connects again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._sender = ""


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(host, port, limit=messages.LINE_BYTES)
    except ConnectionRefusedError:
        raise TransferFailed(f"no sender at {host}:{port} any more, or none that is reached by it") from None
    except (OSError, ValueError) as error:  # the latter of names that cannot be one
        raise SenderSilent(
            f"the trainer's sender at {host}:{port} is not reached ({str(error) or 'no answer'}); if workers "
            "reach that host by another address, start the trainer with --address; no firewall may be between"
        ) from None


def _name(location: str) -> str:
    return location.rstrip("/").rpartition("/")[2]
