"""The worker's connection to the trainer's sender, over which it requests weights.

The engine's ranks receive the tensors (weight_transfer.py). Every failure here is a
:class:`TransferFailed`; the worker then reads the files instead.
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
OFFER_S = 15.0  # for an answer; a queued worker gets one every few seconds
AVOID_S = 60.0  # a sender that did not answer is not asked again for this long
DONE_S = 30.0  # after the last byte


@dataclass
class Place:
    """Where an engine's ranks meet the trainer's sender.

    Attributes:
        backend, name: see :class:`roq.weights.messages.Meeting`.
        host, port: the sender's.
        size: of the group, which is the ranks and the sender.
        address: of this host, on the network of the sender.
    """

    backend: str
    host: str
    port: int
    name: str
    size: int
    address: str


class Receiver:
    """The connection to the current sender, opened at the first request.

    Args:
        ranks: number of ranks of the engine.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sender = ""
        self._silent, self._avoid_until = "", 0.0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @contextmanager
    def watched(self, sender: str) -> Iterator[None]:
        """Close the connection on failure; avoid a silent sender for :data:`AVOID_S`.

        Raises:
            TransferFailed: the sender is being avoided.
        """
        if sender == self._silent and time.monotonic() < self._avoid_until:
            raise TransferFailed(f"the trainer's sender did not answer within the last {AVOID_S:.0f} s")
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
            Where the engine's ranks must meet the sender before the first request; None if they have met.

        Raises:
            TransferFailed: the sender is unreachable.
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
        self._sender = sender
        here = self._writer.get_extra_info("sockname")[0]
        return Place(meeting.backend, host, port, meeting.name, self._ranks + 1, here)

    async def offer(self, location: str) -> messages.Offer:
        """Request the weights at ``location``; the offer lists the tensors, or has the error.

        Raises:
            TransferFailed: no answer.
        """
        offer = await self._ask(messages.Ask(_name(location)), messages.Offer, OFFER_S)
        while offer.queued:
            offer = await self._read(messages.Offer, OFFER_S)
        return offer

    def go(self) -> None:
        """Tell the sender that the engine is ready to receive."""
        assert self._writer is not None
        self._writer.write(messages.encode(messages.Go()))

    async def done(self) -> None:
        """Wait for the sender's confirmation after the last tensor; without it, disconnect."""
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
            raise SenderSilent(f"no answer from the trainer's sender within {limit_s:g} s") from None
        except (OSError, ValueError, TransferFailed) as error:
            raise TransferFailed(f"the trainer's sender ended the connection: {error}") from None

    def close(self) -> None:
        """Disconnect; the next request connects again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._sender = ""


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(host, port, limit=messages.LINE_BYTES)
    except ConnectionRefusedError:
        raise TransferFailed(f"no trainer's sender at {host}:{port}: connection refused") from None
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        raise SenderSilent(
            f"the trainer's sender at {host}:{port} is unreachable ({str(error) or 'no answer'}); check "
            "firewalls, or start the trainer with --address if workers reach its host by another address"
        ) from None


def _name(location: str) -> str:
    return location.rstrip("/").rpartition("/")[2]
