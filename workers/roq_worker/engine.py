"""A wrapper around vLLM that streams tokens and changes weights while they stream.

It adds two things to ``AsyncLLM``: every delta records which weights version sampled each of its tokens,
and :meth:`Engine.swap` rejects weights that do not fit before it writes the first tensor.

Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from roq.config import Rollout
from roq.errors import EngineError, RoqError, StoreFailed, TransferFailed, WeightsError
from roq.text import one_line
from roq.trajectory import Response
from roq.weights import is_url
from roq.weights.safetensors import Shapes
from roq_worker.new_weights import Files, Ranks, Sent, local
from roq_worker.receiver import Receiver
from roq_worker.vllm_start import start_vllm

__all__ = ["Delta", "Engine", "Swapped"]

SWAP_LIMIT_S = 240.0  # a large model from a slow disk takes minutes

Segments = list[tuple[int, int]]


@dataclass(frozen=True)
class Delta:
    """The tokens that one or a few engine steps added to a response.

    ``finish_reason`` is "stop" or "length" in the last delta and None before.
    """

    response: Response
    finish_reason: str | None = None


@dataclass(frozen=True)
class Swapped:
    """How other weights were loaded.

    Attributes:
        seconds: how long generation was paused.
        how: "received" from the trainer's sender, or "read" from files.
        trouble: why they were read although the trainer sends them; empty otherwise.
    """

    seconds: float
    how: Literal["received", "read"]
    trouble: str = ""


class Engine:
    """One vLLM engine, in its own process, with the weights of one version.

    Attributes:
        version: the weights version that new tokens are sampled with.
        tokenizer: the model's tokenizer (transformers).
        inflight: requests that are generating now.
        tokens: tokens sampled since the start.
        progress_at: ``time.monotonic()`` of the last sign of life: an output, or a first request.
    """

    def __init__(self, llm: Any, version: int, shapes: Shapes, tied: bool, rollout: Rollout) -> None:
        self._llm: Any = llm
        self._tied = tied
        self._shapes = self._loaded(shapes)
        self._rollout = rollout
        self._ids = itertools.count()
        self._swapping = asyncio.Lock()
        self._ranks = Ranks(llm)
        self._receiver = Receiver(self._ranks.count)
        self._broken = ""
        self.version = version
        self.tokenizer: Any = llm.get_tokenizer()
        ends = llm.input_processor.generation_config_fields.get("eos_token_id") or []
        self._end_tokens = {self.tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends)}
        self.inflight = 0
        self.tokens = 0
        self.progress_at = time.monotonic()

    @classmethod
    async def start(
        cls, location: str, version: int, rollout: Rollout, *, dtype: str, max_prompt_tokens: int
    ) -> Engine:
        """Start an engine on the weights ``version``: a Hugging Face folder, a hub name, or a store's URL.

        Raises:
            ConfigError: the model or the engine arguments cannot work.
            EngineError: vLLM did not start.
            StoreFailed: the weights cannot be fetched.
        """
        if is_url(location):
            async with local(location) as copy:
                return await cls.start(
                    str(copy), version, rollout, dtype=dtype, max_prompt_tokens=max_prompt_tokens
                )
        # In a thread: starting takes seconds to minutes, and the event loop must keep running.
        # Returned in a list: an idle thread keeps its last result alive, and with it vLLM's sockets.
        started: list[tuple[Any, Shapes, bool]] = []
        limit = max_prompt_tokens + rollout.max_tokens
        start = partial(start_vllm, location, version, rollout, dtype=dtype, max_model_len=limit)
        await asyncio.to_thread(lambda: started.append(start()))
        llm, shapes, tied = started.pop()
        engine = cls(llm, version, shapes, tied, rollout)
        await llm.update_weight_version(str(version))
        return engine

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, seed: int
    ) -> AsyncGenerator[Delta, None]:
        """Sample a continuation of ``prompt`` (token ids, [P]) and yield it as it comes.

        Closing the iterator or cancelling the task aborts the request in the engine at once. To continue
        a prefix, pass prompt + prefix; the prefix cache saves most of its computation.

        Raises:
            EngineError: the engine failed or died.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        rollout = self._rollout
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=seed,
            stop=rollout.stop or None,
            include_stop_str_in_output=True,  # the tokens contain it, so the scored text must too
            detokenize=bool(rollout.stop),
            logprobs=0,  # of the sampled token only
            output_kind=RequestOutputKind.DELTA,
        )
        request_id = f"r{next(self._ids)}"
        # The salt prevents the reuse of blocks computed with other weights (kv_on_swap = "keep").
        request = tokens_input(list(prompt), cache_salt=f"v{self.version}")
        sent, starts = 0, None
        if self.inflight == 0:
            self.progress_at = time.monotonic()
        self.inflight += 1
        try:
            async for output in self._llm.generate(request, params, request_id):
                self.progress_at = time.monotonic()
                new = output.outputs[0]
                if new.weight_versions is not None:  # set in the last output only
                    starts = [(span.version, span.start) for span in new.weight_versions]
                elif starts is None:
                    starts = self._version_starts(request_id)
                if new.finish_reason not in (None, "stop", "length"):
                    why = f"vLLM ended a request with {new.finish_reason!r}"
                    raise EngineError(why)  # noqa: TRY301
                tokens = list(new.token_ids)
                steps: Any = new.logprobs or []  # for each token: {token id: Logprob}
                logprobs = [float(step[token].logprob) for token, step in zip(tokens, steps, strict=True)]
                segments = _spans(starts, sent, sent + len(tokens))
                sent += len(tokens)
                self.tokens += len(tokens)
                yield Delta(Response(tokens, logprobs, segments), new.finish_reason)
        except RoqError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            self.inflight -= 1

    def _version_starts(self, request_id: str) -> list[tuple[str, int]]:
        # (label, first output token) of each span so far; vLLM appends to this list. Its public form,
        # CompletionOutput.weight_versions, is set at the end only, and a released prefix needs its spans too.
        processor = self._llm.output_processor
        (internal_id,) = processor.external_req_ids[request_id]
        return processor.request_states[internal_id].weight_version_starts

    async def swap(self, location: str, version: int, sender: str = "") -> Swapped:
        """Load other weights of the same shapes while requests are in flight; all of them continue.

        With a ``sender`` they are received from the trainer; if that fails, they are read from ``location``.

        With ``kv_on_swap = "recompute"`` the KV cache in flight is recomputed with the new weights, and
        later log-probs equal the new model's; "keep" is cheaper and keeps the cache of the old weights.

        Raises:
            WeightsError, StoreFailed: they cannot be loaded or do not fit; the old weights stay in use.
            EngineError: the engine failed, possibly with some new weights written; do not use it again.
        """
        async with self._swapping, AsyncExitStack() as stack:
            sent, trouble = await self._offered(sender, location) if sender else (None, "")
            files = Files(self._ranks, location, stack)
            if sent is None:
                await self._prepare(files, trouble)
            began = time.monotonic()
            try:
                async with asyncio.timeout(SWAP_LIMIT_S):
                    recompute = self._rollout.kv_on_swap == "recompute"
                    await self._llm.pause_generation(mode="keep", clear_cache=recompute)
                    try:
                        received, trouble = await self._write(sent, files, trouble)
                    except (WeightsError, StoreFailed):
                        if not self._ranks.mixed:
                            await self._llm.resume_generation()
                        raise
                    await self._llm.update_weight_version(str(version))
                    self.version = version
                    await self._llm.resume_generation()
            except Exception as error:
                if isinstance(error, WeightsError | StoreFailed) and not self._ranks.mixed:
                    raise
                # It stays paused: tokens sampled with half-written weights have no version.
                self._broken = f"loading weights v{version} failed midway: {one_line(error)}"
                raise EngineError(self._broken) from error
            self.progress_at = time.monotonic()
            return Swapped(self.progress_at - began, "received" if received else "read", trouble)

    async def _offered(self, sender: str, location: str) -> tuple[Sent | None, str]:
        """Weights that the trainer offers and that fit; or None and the reason to read the files."""
        sent = Sent(self._ranks, self._receiver, sender, location)
        try:
            shapes = await sent.shapes()
        except TransferFailed as error:
            return None, str(error)
        except EngineError as error:
            self._broken = str(error)
            raise
        try:
            self._check_fit("the trainer", shapes)
        except WeightsError as error:
            sent.decline()
            return None, str(error)
        return sent, ""

    async def _prepare(self, files: Files, trouble: str) -> None:
        """Fetch the files and check that they fit; ``trouble``: why the weights were not received."""
        try:
            self._check_fit(files.location, await files.shapes())
        except (WeightsError, StoreFailed) as error:
            if not trouble:
                raise
            raise type(error)(f"{error}; they were not received either: {trouble}") from error

    async def _write(self, sent: Sent | None, files: Files, trouble: str) -> tuple[bool, str]:
        """Load the sent weights, or else the files. Returns True if received, or the reason why not."""
        if sent is not None:
            try:
                await sent.load()
            except TransferFailed as error:
                trouble = str(error)
                await self._prepare(files, trouble)
            else:
                return True, ""
        await files.load()
        return False, trouble

    def _loaded(self, shapes: Shapes) -> Shapes:
        # Some exporters write the output layer even where it is the embedding; vLLM skips it.
        return {n: s for n, s in shapes.items() if not (self._tied and n == "lm_head.weight")}

    def _check_fit(self, source: str, shapes: Shapes) -> None:
        found = self._loaded(shapes)
        if found == self._shapes:
            return
        wrong = [
            f"{name} is {_shape(found.get(name))} instead of {_shape(self._shapes.get(name))}"
            for name in sorted(self._shapes.keys() | found.keys())
            if found.get(name) != self._shapes.get(name)
        ]
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise WeightsError(
            f"{source}: the weights do not fit the running model: {'; '.join(wrong[:3])}{more}"
        )

    @property
    def failure(self) -> str:
        """Why this engine can no longer be used; empty while it works."""
        if not self._broken and (self._llm is None or self._llm.errored):
            self._broken = "vLLM's engine process died; see the worker's log"
        return self._broken

    def check(self, silent_limit_s: float) -> None:
        """Raise EngineError if the engine failed, or has produced no token for ``silent_limit_s``."""
        silent_s = time.monotonic() - self.progress_at
        why = self.failure
        if not why and self.inflight and silent_s > silent_limit_s:
            why = f"vLLM produced no token for {silent_s:.0f} s"
        if why:
            raise EngineError(why)

    def finished(self, tokens: Sequence[int]) -> str | None:
        """Why a response of these tokens is complete ("stop" or "length"); None if it can go on."""
        if tokens and tokens[-1] in self._end_tokens:
            return "stop"
        if self._rollout.stop:
            text = self.decode(tokens)
            if any(stop in text for stop in self._rollout.stop):
                return "stop"
        return "length" if len(tokens) >= self._rollout.max_tokens else None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the engine process; requests in flight are lost. Blocks for at most ``timeout_s``."""
        self._receiver.close()
        self._ranks.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=timeout_s)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a scalar"


def _spans(starts: Sequence[tuple[str, int]], begin: int, end: int) -> Segments:
    """Version and token count of each part of ``[begin, end)``; ``starts``: where each version starts."""
    ends = [start for _, start in starts[1:]] + [end]
    clipped = [
        (int(label), min(stop, end) - max(start, begin))
        for (label, start), stop in zip(starts, ends, strict=True)
    ]
    return [(version, count) for version, count in clipped if count > 0]
