"""Model folders that cannot be used are refused before an engine starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from roq import ConfigError, RunConfig
from roq.config import Data, Job, Model, Rollout, Run
from roq.job.checks import check_lengths, check_model, check_supply


def weights(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


WHOLE = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 2}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights(WHOLE))
    check_model(str(tmp_path), engines_here=True, max_model_len=100)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        DEEP,
        b"9" * 5000,
        b'{"text_config": 3}',
        b'{"text_config": null}',
        b'{"text_config": ["hidden_size"]}',
        b'{"hidden_size": "64", "num_attention_heads": 2}',
        b'{"hidden_size": 64, "num_attention_heads": 0}',
        b'{"hidden_size": 64, "num_attention_heads": 2.5}',
        b'{"hidden_size": 64, "num_attention_heads": -2}',
        b'{"head_dim": {}}',
        b'{"head_dim": NaN}',
        b'{"max_position_embeddings": "many"}',
        b'{"max_position_embeddings": 99}',
    ],
)
def test_odd_configurations(model: Path, text: bytes) -> None:
    (model / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json|positions"):
        check_model(str(model), engines_here=True, max_model_len=100)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        DEEP,
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": null}',
        b'{"weight_map": "model.safetensors"}',
        b'{"weight_map": {"w": 3}}',
        b'{"weight_map": {"w": null}}',
        b'{"weight_map": {"w": ["model.safetensors"]}}',
        b'{"weight_map": {"w": "../model.safetensors"}}',
        b'{"weight_map": {"w": "/etc/passwd"}}',
        b'{"weight_map": {"w": "a\\u0000b.safetensors"}}',
        b'{"weight_map": {"w": "other.safetensors"}}',
    ],
)
def test_odd_indexes(model: Path, index: bytes) -> None:
    (model / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        check_model(str(model), engines_here=False, max_model_len=100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        struct.pack("<Q", 2**63) + bytes(50),
        struct.pack("<Q", 2**40) + bytes(50),
        weights(DEEP),
        weights([]),
        weights({"w": 3}),
        weights({"w": {"data_offsets": []}}),
        weights({"w": {"data_offsets": [0, "x"]}}),
        weights({"w": {"data_offsets": [0, None]}}),
        weights({"w": {"data_offsets": [0, 1e999]}}),
        weights({"w": {"data_offsets": [0, 400]}}),
        weights(b"\xff\xff"),
    ],
)
def test_odd_weights(model: Path, data: bytes) -> None:
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_model(str(model), engines_here=False, max_model_len=100)


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        check_model(str(model), engines_here=False, max_model_len=100)


@pytest.mark.parametrize(
    ("protocol", "prompts", "possible"),
    [
        (RunConfig(eta=0, batch_size=4, total_steps=2), 8, None),
        (RunConfig(eta=0, batch_size=4, epochs=2), 7, None),
        (RunConfig(eta=0, batch_size=4, total_steps=3), 11, "2 steps"),
        (RunConfig(eta=0, batch_size=4, epochs=3, total_steps=9), 11, "8 steps"),
        (RunConfig(eta=0, batch_size=4, epochs=None, total_steps=9), 1, None),
    ],
)
def test_prompts_that_end_before_the_steps(protocol: RunConfig, prompts: int, possible: str | None) -> None:
    warning = check_supply(protocol, prompts)
    assert (warning is None) if possible is None else (warning is not None and possible in warning)


def test_prompts_that_fill_no_batch() -> None:
    with pytest.raises(ConfigError, match=r"3 prompts.*batch_size = 4"):
        check_supply(RunConfig(eta=0, batch_size=4), 3)


def test_an_engine_that_takes_shorter_sequences_than_the_job_allows() -> None:
    def job(max_model_len: int) -> Job:
        return Job(
            run=Run(name="x", dir="/x"),
            protocol=RunConfig(eta=0, batch_size=1),
            model=Model(path="/m"),
            data=Data(file="/f", max_prompt_tokens=32),
            rollout=Rollout(max_tokens=32, engine={"max_model_len": max_model_len}),
        )

    check_lengths(job(64))
    with pytest.raises(ConfigError, match=r"max_model_len = 63 .* 64"):
        check_lengths(job(63))
