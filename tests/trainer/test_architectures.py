"""Each architecture's declaration, compared with the tensors of Hugging Face's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import MODEL_TYPES
from transformers import AutoConfig

from roq_trainer.model import read_shape
from roq_trainer.models import ModelShape, Row, architectures
from roq_trainer.weights import join, layout, pack, split, unpack


@pytest.fixture
def shape(models: Path) -> ModelShape:
    return read_shape(models / "qwen3-untied")


def test_every_architecture_is_tested(models: Path) -> None:
    tested = {read_shape(models / f"{model_type}-tied").architecture.name for model_type in MODEL_TYPES}
    assert tested == set(architectures())


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_rows_are_the_tensors_of_the_model(models: Path, model_type: str, kind: str) -> None:
    folder = models / f"{model_type}-{kind}"
    shape, tensors = read_shape(folder), load_file(folder / "model.safetensors")
    rows = [parameter.row for parameter in layout(shape)]
    assert sorted(name for row in rows for name in row.hf) == sorted(tensors)
    for row in rows:
        full = pack(row, [tensors[name] for name in row.hf], shape)
        assert tuple(full.shape) == row.size
        again = unpack(row, join(row, [split(row, full, rank, 2) for rank in range(2)]), shape)
        assert all(torch.equal(again[name], tensors[name]) for name in row.hf)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    config: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    config |= {f"rope_parameters.{key}": value for key, value in config.pop("rope_parameters").items()}
    (architecture,) = (a for a in architectures().values() if a.name.lower() == f"{model_type}forcausallm")
    for key, value in architecture.defaults.items():
        assert config[key] == value, key
    for key, accepted in architecture.accepted.items():
        value = architecture.defaults.get(key, config[key])
        assert (value[0] if isinstance(value, list) else value) in accepted, f"{key} needs a default"


def test_biases_are_packed_as_their_weights_are(shape: ModelShape) -> None:
    row = Row("linear_qkv.bias", ("q", "k", "v"), (shape.qkv,), 0, "qkv")
    head = shape.head_dim
    parts = [torch.arange(n * head) + 1000.0 * i for i, n in enumerate((4, 2, 2))]
    full = pack(row, parts, shape)
    q, k, v = parts
    first, second = (
        torch.cat([q[2 * head * g :][: 2 * head], k[head * g :][:head], v[head * g :][:head]]) for g in (0, 1)
    )
    assert torch.equal(full, torch.cat([first, second]))
    assert torch.equal(split(row, full, 1, 2), second)
    assert all(torch.equal(a, b) for a, b in zip(unpack(row, full, shape).values(), parts, strict=True))


def test_gate_and_up_are_split_each(shape: ModelShape) -> None:
    row = Row("linear_fc1.weight", ("gate", "up"), (8, 3), 0, "gate_up")
    gate, up = torch.arange(12.0).reshape(4, 3), torch.arange(12.0, 24.0).reshape(4, 3)
    full = pack(row, [gate, up], shape)
    assert torch.equal(split(row, full, 0, 2), torch.cat([gate[:2], up[:2]]))
