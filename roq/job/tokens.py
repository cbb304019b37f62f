"""Tokenize prompts, identically in the checks before a run and on every worker."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from roq.config import Data, Job
from roq.errors import ConfigError
from roq.job.model_folder import is_hub_name
from roq.job.prompts import Prompts
from roq.text import one_line

__all__ = ["check_prompts", "check_prompts_here", "encode"]

BUDGET_S = 20.0  # for the check before a run; workers check every prompt
PROGRESS_S = 5.0


def encode(tokenizer: Any, text: str, data: Data) -> list[int]:
    """Token ids [P] of a prompt; with ``data.chat`` as one user turn of the tokenizer's chat template."""
    if not data.chat:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    # The template adds the special tokens.
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def check_prompts(
    prompts: Prompts,
    tokenizer: Any,
    data: Data,
    *,
    budget_s: float = float("inf"),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Check the length of every prompt, the longest texts first.

    Args:
        tokenizer: the model's (transformers). data: the job's.
        budget_s: after this time, the rest is left to the workers.
        say: gets a line when the check takes long or ends early.

    Raises:
        ConfigError: a prompt has more than ``data.max_prompt_tokens`` tokens or none, or the tokenizer
            has no chat template for ``data.chat``.
    """
    if data.chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("data.chat = true needs a tokenizer with a chat template; this model's has none")
    rows = _unclear(prompts, data)
    began = said_at = time.monotonic()
    for done, (number, text) in enumerate(rows, 1):
        length = len(encode(tokenizer, text, data))
        if not 0 < length <= data.max_prompt_tokens:
            raise ConfigError(
                f"prompt {number} of {data.file or data.dataset} has {length} tokens, "
                f"data.max_prompt_tokens is {data.max_prompt_tokens}; raise it or remove the prompt"
            )
        now = time.monotonic()
        if now - began > budget_s and done < len(rows):
            say(
                f"checked the lengths of the {done} longest of {len(prompts)} prompts; workers check the rest"
            )
            return
        if now - said_at > PROGRESS_S:
            said_at = now
            say(f"checked the lengths of {done} of {len(rows)} prompts")


def _unclear(prompts: Prompts, data: Data) -> list[tuple[int, str]]:
    """Number (from 1) and text of the prompts that must be tokenized, those with the most bytes first."""
    texts = [(number, item["prompt"]) for number, item in enumerate(prompts, 1)]
    if not data.chat:
        # A token has at least one byte, so most prompts are short enough without tokenizing them.
        texts = [one for one in texts if not 0 < len(one[1].encode()) <= data.max_prompt_tokens - 2]
    return sorted(texts, key=lambda one: -len(one[1].encode()))


def check_prompts_here(job: Job, prompts: Prompts, say: Callable[[str], None]) -> None:
    """Check prompt lengths before a run is created.

    Without a tokenizer library or access to the hub, reports that workers will check. Workers always do.

    Raises:
        ConfigError: as :func:`check_prompts`, or the tokenizer in the model's folder cannot be loaded.
    """
    if not job.data.chat and not _unclear(prompts, job.data):
        return
    path = str(job.rollout.engine.get("tokenizer") or job.model.path)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        say("workers will check prompt lengths: no tokenizer library is installed here (transformers)")
        return
    try:
        trusted = bool(job.rollout.engine.get("trust_remote_code"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    except Exception as error:  # noqa: BLE001 - its errors share no base class
        why = f"the tokenizer of {path} cannot be loaded: {one_line(error)}"
        if not is_hub_name(path):
            raise ConfigError(why) from None
        say(f"workers will check prompt lengths: {why}")
        return
    check_prompts(prompts, tokenizer, job.data, budget_s=BUDGET_S, say=say)
