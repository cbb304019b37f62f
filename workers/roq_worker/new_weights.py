"""The two sources of new weights for a running engine: files, or the trainer's sender.

Each first lists its tensors (``shapes``), so weights that do not fit are rejected before the first write.
``load`` then writes them, while generation is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from roq.errors import ConfigError, EngineError, SenderSilent, TransferFailed, WeightsError
from roq.weights import fetch
from roq.weights.messages import Offer
from roq.weights.safetensors import Shapes, read_shapes
from roq_worker.receiver import Place, Receiver

__all__ = ["Files", "Ranks", "Sent", "local"]

MEET_LIMIT_S = 60.0  # each rank gives up long before


class Ranks:
    """The ranks of an engine, for loading weights.

    Attributes:
        count: the number of ranks.
        mixed: the model has some new and some old weights, until a complete version is loaded.
    """

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm
        self.count: int = llm.vllm_config.parallel_config.world_size
        self.mixed = False

    def close(self) -> None:
        """Release the engine."""
        self._llm = None

    async def meet(self, place: Place) -> None:
        """Connect all ranks with the trainer's sender. Generation stops during this call.

        Raises:
            SenderSilent: a rank did not reach it.
            EngineError: the engine did not answer.
        """
        try:
            async with asyncio.timeout(MEET_LIMIT_S):
                answers = await self._llm.collective_rpc("roq_meet", args=(asdict(place),))
        except TimeoutError:
            raise EngineError(
                f"vLLM did not answer within {MEET_LIMIT_S:.0f} s while connecting to the trainer's sender"
            ) from None
        if trouble := next(filter(None, answers), ""):
            raise SenderSilent(f"the engine did not reach the sender at {place.host}:{place.port}: {trouble}")

    async def load(self, source: dict[str, Any]) -> None:
        """Load a :class:`roq_worker.weight_transfer.Source` on every rank.

        Raises:
            WeightsError: a rank failed; :attr:`mixed` is set if anything was written.
        """
        answers: list[tuple[bool, str]] = await self._llm.collective_rpc("roq_load", args=(source,))
        errors = [error for _, error in answers if error]
        self.mixed = bool(errors) and (self.mixed or any(written for written, _ in answers))
        if errors:
            raise WeightsError(errors[0])


class Files:
    """The files at ``location``, a folder or a URL; the local copy is kept while ``stack`` is open."""

    def __init__(self, ranks: Ranks, location: str, stack: AsyncExitStack) -> None:
        self.location = location
        self._ranks = ranks
        self._stack = stack
        self._folder = Path()

    async def shapes(self) -> Shapes:
        """Fetch the files, unless they are on this host, and read their headers.

        Raises:
            WeightsError, StoreFailed: files are missing or incomplete.
        """
        self._folder = await self._stack.enter_async_context(local(self.location))
        if not self._folder.is_dir():
            raise WeightsError(
                f"{self._folder}: no such folder; check that this host mounts the weights folder"
            )
        try:
            return await asyncio.to_thread(read_shapes, self._folder)
        except ConfigError as error:
            raise WeightsError(str(error)) from None

    async def load(self) -> None:
        """Write the weights into the model; raises as :meth:`Ranks.load`."""
        await self._ranks.load({"path": str(self._folder)})


class Sent:
    """The version at ``location``, sent by the trainer's ``sender``."""

    def __init__(self, ranks: Ranks, receiver: Receiver, sender: str, location: str) -> None:
        self._ranks = ranks
        self._receiver = receiver
        self._sender = sender
        self._location = location
        self._offer = Offer()

    async def shapes(self) -> Shapes:
        """Request the weights; the sender then waits for :meth:`load` or :meth:`decline`.

        Raises:
            TransferFailed: the sender is unreachable, or does not have them.
            EngineError: the engine did not answer.
        """
        with self._receiver.watched(self._sender):
            place = await self._receiver.connect(self._sender)
            if place is not None:
                await self._ranks.meet(place)
            self._offer = await self._receiver.offer(self._location)
        if self._offer.error:  # the connection stays usable
            raise TransferFailed(self._offer.error)
        return {tensor.name: tuple(tensor.shape) for tensor in self._offer.tensors}

    async def load(self) -> None:
        """Receive the weights.

        Raises:
            TransferFailed: the transfer broke off; ``Ranks.mixed`` is set if anything was written.
        """
        self._receiver.go()
        try:
            await self._ranks.load({"offer": msgspec.json.encode(self._offer)})
        except WeightsError as error:
            self._receiver.close()
            raise TransferFailed(f"receiving weights from the trainer failed: {error}") from error
        await self._receiver.done()

    def decline(self) -> None:
        """Reject the offer."""
        self._receiver.close()


@asynccontextmanager
async def local(location: str) -> AsyncGenerator[Path]:
    """A folder on this host with the weights; fetches those in an object store while generation continues."""
    copy = fetch(location)
    folder = await asyncio.to_thread(copy.__enter__)
    try:
        yield folder
    finally:
        copy.__exit__(None, None, None)
