"""Model folders that cannot be trained, exports in several files, and interrupted saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roq import Scheduler, Status, WeightsRef
from roq.errors import ConfigError
from roq.weights import FolderStore
from roq.weights.safetensors import WeightFiles, check_weights
from roq_trainer import cpu, weights
from roq_trainer.model import check_parallel, read_shape
from roq_trainer.train import lost_newest


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "qwen3-untied", tmp_path / "model"))


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def find(folder: Path) -> None:
    """Read a model folder as the trainer does at its start."""
    check_weights(folder)
    read_shape(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "9"}}'),
            "weight_map",
        ),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: change(f, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (lambda f: change(f, attention_bias=True), "attention_bias = True"),
        (lambda f: change(f, hidden_act="gelu"), "hidden_act = 'gelu'"),
        (lambda f: change(f, layer_types=["full_attention", "sliding_attention"]), "layer_types = "),
        (lambda f: change(f, rope_parameters={"rope_type": "yarn"}), "rope_type = 'yarn'"),
        (lambda f: change(f, rope_parameters=None, rope_scaling={"type": "linear"}), "rope_type = 'linear'"),
    ],
)  # fmt: skip
def test_an_unsuitable_folder_is_refused_with_a_reason(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        find(folder)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (5, 1, r"\b96\b.*tensor_parallel = 5"),
        (4, 1, r"\b2\b.*tensor_parallel = 4"),
        (1, 4, r"\b2\b.*pipeline_parallel = 4"),
    ],
)
def test_a_split_with_a_remainder_is_refused(models: Path, tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(read_shape(models / "qwen3-tied"), tensor, pipeline)


def test_older_and_newer_configurations_read_the_same(folder: Path) -> None:
    newer = read_shape(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": rope["rope_theta"]}))
    assert read_shape(folder) == newer


def test_a_large_export_is_several_files_that_hugging_face_reads(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 50_000)
    wanted = load_file(models / "qwen3-untied" / "model.safetensors")
    weights._write(iter(wanted.items()), models / "qwen3-untied", tmp_path / "v1")
    assert len(list((tmp_path / "v1").glob("model-*.safetensors"))) > 2
    check_weights(tmp_path / "v1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    with WeightFiles(tmp_path / "v1") as files:
        assert all(torch.equal(files[name], tensor) for name, tensor in wanted.items())


def test_an_export_that_dies_midway_leaves_no_version(models: Path, tmp_path: Path) -> None:
    def dying() -> object:
        yield from list(load_file(models / "qwen3-untied" / "model.safetensors").items())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights._write(dying(), models / "qwen3-untied", tmp_path / "v00000001")
    assert not (tmp_path / "v00000001").exists()
    weights._write(iter({"a": torch.ones(1)}.items()), models / "qwen3-untied", tmp_path / "v00000001")
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


def test_weights_that_were_lost_are_noticed(models: Path, tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    location = store.new(1)
    folder = store.folder(location)
    registered = [WeightsRef(version=0, location="base"), WeightsRef(version=1, location=location)]
    published = SimpleNamespace(status=lambda: Status(version=1), weights=lambda: registered)

    def lost(version: int = 1) -> bool:
        found = lost_newest(cast("Scheduler", published), version, store)
        assert found in (None, location), "written again where it is registered"
        return found is not None

    assert lost()
    assert not lost(2), "only the published version is anybody's"
    shutil.copytree(models / "qwen3-untied", folder)
    assert not lost()
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + data[8:])
    assert lost()
    file.write_bytes(data[: len(data) // 2])
    assert lost()


@pytest.mark.skipif(cpu.HAVE_CUDA, reason="only without CUDA")
def test_cuda_means_cpu_only_inside() -> None:
    before = torch.cuda.current_device
    with cpu.megatron_device():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"
        assert torch.zeros(1).to("cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.current_device is before
    assert torch.zeros(1).type() == "torch.FloatTensor"
