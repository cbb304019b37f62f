"""The worker's side of weights that the trainer sends: the connection over which they are asked for.

The tensors themselves come to the engine's ranks (weight_transfer.py). Everything here fails as
:class:`TransferFailed`, and then the files are read instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from roq import transfer
from roq.transfer import TransferFailed

__all__ = ["Receiver"]

CONNECT_S = 10.0
OFFER_S = 150.0  # for a turn among the workers; generation goes on meanwhile
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
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def offer(self, sender: str, location: str) -> transfer.Offer:
        """What will come of the weights at ``location`` from ``sender``, both a worker's answer from ``pin``.

        Raises:
            TransferFailed: the sender is not reached, or does not have it.
        """
        if sender != self._sender:
            self.close()
        if self._writer is None:
            await self._connect(sender)
        offer = await self._ask(
            transfer.Ask(location.rstrip("/").rpartition("/")[2]), transfer.Offer, OFFER_S
        )
        if offer.error:  # the connection is as good as before
            raise TransferFailed(offer.error)
        return offer

    def go(self) -> None:
        """The engine is about to receive."""
        assert self._writer is not None
        self._writer.write(transfer.encode(transfer.Go()))

    async def done(self) -> None:
        """Everything was received; wait for the sender to say the same.

        Raises:
            TransferFailed: it does not.
        """
        await self._read(transfer.Done, DONE_S)

    async def _connect(self, sender: str) -> None:
        host, port, secret = transfer.split_address(sender)
        self._reader, self._writer = await _open(host, port)
        transfer.notice_death(self._writer.get_extra_info("socket"))
        meeting = await self._ask(transfer.Hello(secret, self._ranks), transfer.Meeting, CONNECT_S)
        if meeting.error:
            self.close()
            raise TransferFailed(meeting.error)
        try:
            _, probe = await _open(host, meeting.port)  # the engine stands still while its ranks try
            probe.close()
        except TransferFailed:
            self.close()
            raise
        place = {"backend": meeting.backend, "host": host, "port": meeting.port, "name": meeting.name}
        here = self._writer.get_extra_info("sockname")[0]
        if trouble := await self._meet(place | {"size": self._ranks + 1, "address": here}):
            self.close()
            raise TransferFailed(f"the engine did not meet the sender at {host}:{port}: {trouble}")
        self._sender = sender

    async def _ask(self, message: msgspec.Struct, kind: type[Any], limit_s: float) -> Any:
        assert self._writer is not None
        self._writer.write(transfer.encode(message))
        return await self._read(kind, limit_s)

    async def _read(self, kind: type[Any], limit_s: float) -> Any:
        assert self._reader is not None
        try:
            async with asyncio.timeout(limit_s):
                return transfer.decode(await self._reader.readline(), kind)
        except TransferFailed:
            self.close()
            raise
        except (OSError, TimeoutError, ValueError) as error:
            self.close()
            what = str(error) or f"nothing came within {limit_s:g} s"
            raise TransferFailed(f"the trainer's sender: {what}") from None

    def close(self) -> None:
        """Leave the sender; the next offer connects again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._sender = ""


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(host, port, limit=transfer.LINE_BYTES)
    except (OSError, TimeoutError) as error:
        what = str(error) or "no answer"
        raise TransferFailed(
            f"the trainer's sender at {host}:{port} is not reached ({what}); if workers reach that host by "
            "another address, start the trainer with --address; no firewall may be between them"
        ) from None
