"""A tiny Qwen3 with a real tokenizer, generated here, and one engine on it per module."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["CXX"] = "/nonexistent"  # no worker needs a compiler

VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*/=() abcdefghijklmnopqrstuvwxyzQA:.,?<>\n"]

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def make_model(folder: Path, *, seed: int = 0, tied: bool = False, spare: int = 200, **changes: Any) -> Path:
    """A random Qwen3 of 2 layers, hidden 64, head size 32, with a character tokenizer.

    ``spare`` tokens without a use make the end token, and so the end of a response, rarer.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = [*VOCABULARY, *(chr(0x4E00 + i) for i in range(spare))]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    shape = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.2,  # far from uniform: wrong weights show in the log-probs
    } | changes
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)
    fast.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``models(seed=…, tied=…)`` → the folder of such a model, generated once per session."""
    made: dict[str, Path] = {}

    def get(**settings: Any) -> Path:
        key = json.dumps(settings, sort_keys=True)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model"), **settings)
        return made[key]

    return get


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a coroutine on the module's event loop: an engine belongs to one loop for its lifetime."""
    loop = asyncio.new_event_loop()

    def within(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    yield within
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(scope="module")
def close(run: Run) -> Callable[[Any], None]:
    """Close an engine, and let its sockets close, before the next test."""

    async def a_moment() -> None:
        await asyncio.sleep(0.05)  # vLLM closes its sockets in the loop

    def end(engine: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM leaves its ZeroMQ context to the garbage collector
            engine.close()
            run(a_moment())
            gc.collect()

    return end
