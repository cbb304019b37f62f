"""The two ways in which other weights come into a running engine: as files, or sent by the trainer.

Each first says which tensors will come (``shapes``), so that what does not fit is refused before the first
write, and then writes them (``load``), while the engine generates nothing.
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

MEET_LIMIT_S = 60.0  # each rank ends by itself long before


class Ranks:
    """The ranks of an engine, as far as weights are concerned.

    Attributes:
        count: how many there are.
        mixed: the model holds some new weights and some old ones; only loading all of them ends that.
    """

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm
        self.count: int = llm.vllm_config.parallel_config.world_size
        self.mixed = False

    def close(self) -> None:
        """Let go of the engine."""
        self._llm = None

    async def meet(self, place: Place) -> None:
        """Bring all ranks together with the trainer's sender. Generation stands still for it.

        Raises:
            SenderSilent: a rank did not meet it.
            EngineError: the engine did not answer.
        """
        try:
            async with asyncio.timeout(MEET_LIMIT_S):
                answers = await self._llm.collective_rpc("roq_meet", args=(asdict(place),))
        except TimeoutError:
            raise EngineError(
                f"vLLM did not answer within {MEET_LIMIT_S:.0f} s when it met the trainer's sender"
            ) from None
        if trouble := next(filter(None, answers), ""):
            raise SenderSilent(f"the engine did not meet the sender at {place.host}:{place.port}: {trouble}")

    async def load(self, source: dict[str, Any]) -> None:
        """Load a :class:`roq_worker.weight_transfer.Source` on every rank.

        Raises:
            WeightsError: a rank failed; :attr:`mixed` says whether anything was written.
        """
        answers: list[tuple[bool, str]] = await self._llm.collective_rpc("roq_load", args=(source,))
        errors = [error for _, error in answers if error]
        self.mixed = bool(errors) and (self.mixed or any(written for written, _ in answers))
        if errors:
            raise WeightsError(errors[0])


class Files:
    """The files at ``location``: a folder, or an object store's; a copy is kept while ``stack`` is open."""

    def __init__(self, ranks: Ranks, location: str, stack: AsyncExitStack) -> None:
        self.location = location
        self._ranks = ranks
        self._stack = stack
        self._folder = Path()

    async def shapes(self) -> Shapes:
        """Fetch them, if they are not on this host, and read their headers.

        Raises:
            WeightsError, StoreFailed: they are not there, or not whole.
        """
        self._folder = await self._stack.enter_async_context(local(self.location))
        if not self._folder.is_dir():
            raise WeightsError(
                f"{self._folder}: there is no such folder; is it on a disk that this host shares?"
            )
        try:
            return await asyncio.to_thread(read_shapes, self._folder)
        except ConfigError as error:
            raise WeightsError(str(error)) from None

    async def load(self) -> None:
        """Write them into the model.

        Raises:
            WeightsError: a rank failed.
        """
        await self._ranks.load({"path": str(self._folder)})


class Sent:
    """What the trainer's ``sender`` sends of the version at ``location``."""

    def __init__(self, ranks: Ranks, receiver: Receiver, sender: str, location: str) -> None:
        self._ranks = ranks
        self._receiver = receiver
        self._sender = sender
        self._location = location
        self._offer = Offer()

    async def shapes(self) -> Shapes:
        """Ask for them; the sender then waits for :meth:`load`, or :meth:`decline`.

        Raises:
            TransferFailed: the sender is not reached, or does not have them.
            EngineError: the engine did not answer.
        """
        with self._receiver.watched(self._sender):
            place = await self._receiver.connect(self._sender)
            if place is not None:
                await self._ranks.meet(place)
            self._offer = await self._receiver.offer(self._location)
        if self._offer.error:  # the connection is as good as before
            raise TransferFailed(self._offer.error)
        return {tensor.name: tuple(tensor.shape) for tensor in self._offer.tensors}

    async def load(self) -> None:
        """Receive them.

        Raises:
            TransferFailed: not all came; ``Ranks.mixed`` says whether anything was written.
        """
        self._receiver.go()
        try:
            await self._ranks.load({"offer": msgspec.json.encode(self._offer)})
        except WeightsError as error:
            self._receiver.close()
            raise TransferFailed(f"the trainer's weights did not come whole: {error}") from error
        await self._receiver.done()

    def decline(self) -> None:
        """Take nothing of what was offered."""
        self._receiver.close()


@asynccontextmanager
async def local(location: str) -> AsyncGenerator[Path]:
    """Weights as a folder on this host; those in an object store are fetched, while generation goes on."""
    copy = fetch(location)
    folder = await asyncio.to_thread(copy.__enter__)
    try:
        yield folder
    finally:
        copy.__exit__(None, None, None)
