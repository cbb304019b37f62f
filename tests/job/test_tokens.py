"""Prompt lengths are checked with the model's tokenizer before a run is created."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roq.config import Data, Job, Model, Reward, Rollout, Run, RunConfig
from roq.errors import ConfigError
from roq.job.prompts import Prompts
from roq.job.tokens import check_prompts, check_prompts_here, encode


class Tokenizer:
    """A token for every character; the chat template adds three."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return [ord(c) for c in text] + [0] * add_special_tokens

    def apply_chat_template(self, turn: list[dict[str, str]], **_: Any) -> str:
        return f"<{turn[0]['content']}>:"


def prompts(*texts: str) -> Prompts:
    return Prompts([{"prompt": text, "question": text, "answer": ""} for text in texts])


def job(**data: Any) -> Job:
    return Job(
        run=Run(name="test", dir="run"),
        protocol=RunConfig(eta=0, batch_size=1),
        model=Model(path="some/model"),
        data=Data(file="prompts.jsonl", **data),
        reward=Reward(function="roq.rewards:exact_match"),
        rollout=Rollout(),
    )


def test_a_prompt_that_is_too_long_is_named_with_its_length_and_the_limit() -> None:
    data = Data(file="prompts.jsonl", max_prompt_tokens=10)
    check_prompts(prompts("x" * 9, "short"), Tokenizer(), data)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl.*\b11\b.*\b10\b"):
        check_prompts(prompts("short", "x" * 10), Tokenizer(), data)


def test_what_is_short_enough_at_a_glance_is_not_tokenised() -> None:
    tokenizer = Tokenizer()
    check_prompts(prompts("x" * 8, "x" * 9), tokenizer, Data(file="f", max_prompt_tokens=10))
    assert tokenizer.encoded == ["x" * 9]


def test_chat_prompts_are_counted_with_their_template() -> None:
    data = Data(file="f", chat=True, max_prompt_tokens=8)
    assert len(encode(Tokenizer("…"), "12345", data)) == 8
    check_prompts(prompts("12345"), Tokenizer("…"), data)
    with pytest.raises(ConfigError, match=r"\b9\b"):
        check_prompts(prompts("123456"), Tokenizer("…"), data)
    with pytest.raises(ConfigError, match="chat template"):
        check_prompts(prompts("1"), Tokenizer(), data)


def test_a_check_that_takes_too_long_looks_at_the_longest_and_says_so() -> None:
    said: list[str] = []
    tokenizer = Tokenizer()
    texts = ["é" * length for length in (20, 22, 21)]
    check_prompts(
        prompts(*texts), tokenizer, Data(file="f", max_prompt_tokens=23), budget_s=-1.0, say=said.append
    )
    assert tokenizer.encoded == ["é" * 22]
    assert len(said) == 1
    assert "1 longest of 3" in said[0]


def test_without_a_tokenizer_library_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said: list[str] = []
    check_prompts_here(job(max_prompt_tokens=3), prompts("too long"), said.append)
    assert len(said) == 1
    check_prompts_here(job(max_prompt_tokens=99), prompts("short"), said.append)
    assert len(said) == 1, "nothing is left to check"


def test_the_models_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []
    away = False

    def from_pretrained(path: str, *, trust_remote_code: bool) -> Tokenizer:
        asked.append((path, trust_remote_code))
        if away:
            raise OSError("cannot be\nreached")
        return Tokenizer()

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", library)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"\b9\b"):
        check_prompts_here(job(max_prompt_tokens=3), prompts("too long"), said.append)
    assert asked == [("some/model", False)]
    assert said == []
    away = True
    check_prompts_here(job(max_prompt_tokens=3), prompts("too long"), said.append)
    assert len(said) == 1, "the hub is not reached: workers check"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"some/model.*cannot be reached"):
        check_prompts_here(job(max_prompt_tokens=3), prompts("too long"), said.append)
