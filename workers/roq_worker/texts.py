"""From a prompt's text to token ids, the same on every worker."""

from __future__ import annotations

from typing import Any

from roq.config import Data
from roq.errors import ConfigError
from roq.job.prompts import Prompts

__all__ = ["check_lengths", "encode"]


def encode(tokenizer: Any, text: str, data: Data) -> list[int]:
    """Token ids [P] of a prompt; with ``data.chat`` as one user turn of the tokenizer's chat template."""
    if not data.chat:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def check_lengths(prompts: Prompts, tokenizer: Any, data: Data) -> None:
    """Refuse prompts that do not fit before any of them is generated from.

    Raises:
        ConfigError: a prompt has more than ``data.max_prompt_tokens`` tokens or none, or the tokenizer
            has no chat template for ``data.chat``.
    """
    if data.chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("data.chat = true needs a tokenizer with a chat template; this model's has none")
    for row, item in enumerate(prompts, 1):
        text = item["prompt"]
        # A token stands for at least a byte, so most prompts are short enough at a glance.
        if not data.chat and 0 < len(text.encode()) <= data.max_prompt_tokens - 2:
            continue
        length = len(encode(tokenizer, text, data))
        if not 0 < length <= data.max_prompt_tokens:
            raise ConfigError(
                f"prompt {row} of {data.file or data.dataset} has {length} tokens, "
                f"data.max_prompt_tokens is {data.max_prompt_tokens}; raise it or remove the prompt"
            )
