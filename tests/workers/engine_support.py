"""Helpers for the engine's tests: responses, their log-probs from Hugging Face, and swaps in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roq.trajectory import Response
from roq_worker.engine import Engine, Swapped

PROMPT = [46, 48, 19, 3, 4, 12, 5, 16] * 5  # longer than a block: prefixes are cached

Models = Callable[..., Path]

Within = Callable[[Any], Any]


async def collect(engine: Engine, prompt: Sequence[int], seed: int, max_tokens: int = 120) -> Response:
    """A complete response, assembled as the worker does it."""
    draft = Response()
    async for delta in engine.generate(prompt, max_tokens=max_tokens, seed=seed):
        draft.extend(delta.response)
    return draft


def reference(
    folder: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 0.8
) -> list[float]:
    """Log-probs [T] of ``tokens`` after ``prompt``, from Hugging Face in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([[*prompt, *tokens]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return logprobs[:, 0].tolist()


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def swap_midway(
    engine: Engine, folder: Path, version: int, count: int, after: int, sender: str = ""
) -> tuple[list[Response], Swapped]:
    """``count`` responses of 400 tokens, with new weights loaded after ``after`` tokens of one of them."""
    drafts = [Response() for _ in range(count)]
    swapped: list[asyncio.Task[Swapped]] = []

    async def one(draft: Response, seed: int) -> None:
        async for delta in engine.generate(PROMPT, max_tokens=400, seed=seed):
            draft.extend(delta.response)
            if len(draft.tokens) >= after and not swapped:
                swapped.append(asyncio.create_task(engine.swap(str(folder), version, sender)))

    await asyncio.gather(*(one(draft, 100 + seed) for seed, draft in enumerate(drafts)))
    return drafts, await swapped[0]
