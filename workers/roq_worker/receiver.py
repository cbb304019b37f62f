"""The worker's side of weights that the trainer sends: the connection over which they are asked for.

The tensors themselves come to the engine's ranks (weight_transfer.py). Everything here fails as
:class:`TransferFailed`, and then the files are read instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from roq.errors import SenderSilent, TransferFailed
from roq.weights import messages

__all__ = ["Receiver"]

CONNECT_S = 10.0
OFFER_S = 15.0  # for an answer; one that waits for its turn is told so every few seconds
AVOID_S = 60.0  # a sender that does not answer is not asked again for so long
DONE_S = 30.0  # after the last byte


class Receiver:
    """A connection to the sender of the moment; it is opened when weights are asked for, and kept.

    Args:
        ranks: of the engine. meet: brings them together with the sender; says why when it did not.
    """

    def __init__(self, ranks: int, meet: Callable[[dict[str, Any]], Awaitable[str]]) -> None:
        self._ranks = ranks
        self._meet = meet
        self._sender = ""
        self._silent, self._avoid_until = "", 0.0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def offer(self, sender: str, location: str) -> messages.Offer:
        """What will come of the weights at ``location`` from ``sender``, both a worker's answer from ``pin``.

        Raises:
            TransferFailed: the sender is not reached, or does not have it.
        """
        if sender != self._sender:
            self.close()
        if sender == self._silent and time.monotonic() < self._avoid_until:
            raise TransferFailed("the trainer's sender did not answer a moment ago")
        try:
            if self._writer is None:
                await self._connect(sender)
            offer = await self._ask(messages.Ask(_name(location)), messages.Offer, OFFER_S)
            while offer.queued:
                offer = await self._read(messages.Offer, OFFER_S)
        except TransferFailed as error:
            self.close()
            if isinstance(error, SenderSilent):
                self._silent, self._avoid_until = sender, time.monotonic() + AVOID_S
            raise
        if offer.error:  # the connection is as good as before
            raise TransferFailed(offer.error)
        return offer

    def go(self) -> None:
        """The engine is about to receive."""
        assert self._writer is not None
        self._writer.write(messages.encode(messages.Go()))

    async def done(self) -> None:
        """Everything was received; wait for the sender to say the same.

        Raises:
            TransferFailed: it does not.
        """
        await self._read(messages.Done, DONE_S)

    async def _connect(self, sender: str) -> None:
        host, port, secret = messages.split_address(sender)
        self._reader, self._writer = await _open(host, port)
        messages.notice_death(self._writer.get_extra_info("socket"))
        meeting = await self._ask(messages.Hello(secret, self._ranks), messages.Meeting, CONNECT_S)
        if meeting.error:
            raise TransferFailed(meeting.error)
        _, probe = await _open(host, meeting.port)  # the engine stands still while its ranks try
        probe.close()
        place = {"backend": meeting.backend, "host": host, "port": meeting.port, "name": meeting.name}
        here = self._writer.get_extra_info("sockname")[0]
        if trouble := await self._meet(place | {"size": self._ranks + 1, "address": here}):
            raise SenderSilent(f"the engine did not meet the sender at {host}:{port}: {trouble}")
        self._sender = sender

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
