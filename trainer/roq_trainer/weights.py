"""Convert weights between the Hugging Face layout and Megatron's shards, one parameter at a time.

:func:`layout` lists every parameter of the model with its pipeline stage, how tensor parallelism
splits it and which Hugging Face tensors it is packed from. Loading and exporting iterate over that list.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from roq.errors import ConfigError
from roq.weights.safetensors import WeightFiles
from roq_trainer.models import ModelShape, Row
from roq_trainer.parallel import pipeline_group, tensor_group

__all__ = ["MAX_FILE_BYTES", "Parameter", "durable_rename", "export", "layout", "load"]

MAX_FILE_BYTES = 4 << 30
"""Rank 0 holds at most this much of an export in memory before it writes a file."""

COPIED = (".json", ".txt", ".jinja", ".model", ".tiktoken")
"""Files of the base model that every export includes: tokenizer, chat template, generation settings."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model.

    Attributes:
        row: its names and shape; Megatron's name is relative to its pipeline stage.
        stage: the pipeline stage that holds it.
        exported: False for the second copy of tied embeddings, on the last stage.
    """

    row: Row
    stage: int
    exported: bool = True


def layout(shape: ModelShape, pipeline: int = 1) -> list[Parameter]:
    """Every parameter, in export order."""
    last, per_stage = pipeline - 1, shape.layers // pipeline
    table = (shape.vocab, shape.hidden)
    embedding = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), table, 0)
    norm = Row("decoder.final_layernorm.weight", ("model.norm.weight",), (shape.hidden,))
    output = Row("output_layer.weight", ("lm_head.weight",), table, 0)
    out = [Parameter(embedding, 0)]
    for layer in range(shape.layers):
        stage, local = divmod(layer, per_stage)  # Megatron counts from each stage's first layer
        for row in shape.architecture.layer(shape):
            hf = tuple(f"model.layers.{layer}.{name}" for name in row.hf)
            out.append(Parameter(replace(row, name=f"decoder.layers.{local}.{row.name}", hf=hf), stage))
    out.append(Parameter(norm, last))
    if not shape.tied:
        out.append(Parameter(output, last))
    elif pipeline > 1:
        out.append(Parameter(replace(output, hf=embedding.hf), last, exported=False))
    return out


def pack(row: Row, parts: list[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """Pack Hugging Face tensors into Megatron's unsplit one.

    "qkv" is packed per key/value group, [groups, (heads / groups + 2) * head_dim, ...]: the query heads of
    a group, then its key, then its value.
    """
    if row.packing == "qkv":
        grouped = [part.reshape(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(row.size)
    return torch.cat(parts) if row.packing == "gate_up" else parts[0]


def unpack(row: Row, full: torch.Tensor, shape: ModelShape) -> dict[str, torch.Tensor]:
    """The inverse of :func:`pack`, by Hugging Face name."""
    if row.packing is None:
        return {row.hf[0]: full}
    if row.packing == "qkv":
        q = shape.heads // shape.kv_heads * shape.head_dim
        grouped = full.reshape(shape.kv_heads, -1, *full.shape[1:])
        pieces = grouped.split([q, shape.head_dim, shape.head_dim], dim=1)
    else:
        pieces = full.chunk(2)
    # Cloned: safetensors refuses tensors that share storage.
    return {n: p.reshape(-1, *full.shape[1:]).clone() for n, p in zip(row.hf, pieces, strict=True)}


def split(row: Row, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The shard of tensor-parallel rank ``rank`` of ``size``."""
    if row.split is None or size == 1:
        return full
    if row.packing == "gate_up":
        return torch.cat([part.chunk(size)[rank] for part in full.chunk(2)])
    return full.chunk(size, dim=row.split)[rank]


def join(row: Row, shards: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`split` over all ranks."""
    if row.split is None or len(shards) == 1:
        return shards[0]
    if row.packing == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards, dim=row.split)


def _find(model: torch.nn.Module) -> Callable[[str], torch.nn.Parameter]:
    """A lookup of parameters by the local spec's names, which maps those that Transformer Engine renames."""
    by_name = {
        name.removeprefix("module.").removeprefix("module."): p for name, p in model.named_parameters()
    }

    def find(name: str) -> torch.nn.Parameter:
        if name not in by_name:  # TE keeps a norm inside the linear layer that follows it
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        return by_name[name]

    return find


@torch.no_grad()
def load(model: torch.nn.Module, shape: ModelShape, folder: Path) -> None:
    """Fill this rank's shard from a Hugging Face folder.

    Raises:
        ConfigError: a tensor is missing, or its shape does not match ``config.json``.
    """
    tp_group, pp_group = tensor_group(), pipeline_group()
    files, find = WeightFiles(folder), _find(model)
    for parameter in layout(shape, pp_group.size()):
        if parameter.stage != pp_group.rank():
            continue
        row = parameter.row
        if missing := [name for name in row.hf if name not in files]:
            raise ConfigError(f"model folder {folder}: tensor {missing[0]} of config.json's model is missing")
        try:
            full = pack(row, [files[name] for name in row.hf], shape)
        except RuntimeError:
            full = torch.empty(0)
        if tuple(full.shape) != row.size:
            raise ConfigError(f"model folder {folder}: the shape of {row.hf[0]} does not match config.json")
        # copy_, not assignment: the data-parallel wrapper has hooks on the existing tensor.
        find(row.name).copy_(split(row, full, tp_group.rank(), tp_group.size()))


def _gather(model: torch.nn.Module, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor on rank 0. Collective over the ranks of one replica."""
    tp_group, pp_group = tensor_group(), pipeline_group()
    tp, stage = tp_group.rank(), pp_group.rank()
    find = _find(model)
    for parameter in layout(shape, pp_group.size()):
        if not parameter.exported:
            continue
        row = parameter.row
        full: torch.Tensor | None = None
        if parameter.stage == stage:
            local = find(row.name).detach().contiguous()
            shards = [local]
            if tp_group.size() > 1 and row.split is not None:
                shards = [torch.empty_like(local) for _ in range(tp_group.size())] if tp == 0 else []
                root = dist.get_global_rank(tp_group, 0)
                dist.gather(local, shards or None, dst=root, group=tp_group)
            if tp == 0:
                full = join(row, shards)
        if tp != 0:
            continue
        if parameter.stage != 0:  # the stage's first TP rank sends it to rank 0
            if stage == parameter.stage:
                assert full is not None
                dist.send(full, dst=dist.get_global_rank(pp_group, 0), group=pp_group)
            elif stage == 0:
                like = next(iter(model.parameters()))
                full = torch.empty(row.size, dtype=like.dtype, device=like.device)
                dist.recv(full, src=dist.get_global_rank(pp_group, parameter.stage), group=pp_group)
        if stage == 0:
            assert full is not None
            yield from ((name, part.cpu()) for name, part in unpack(row, full, shape).items())


@torch.no_grad()
def export(model: torch.nn.Module, shape: ModelShape, source: Path, target: Path) -> None:
    """Write the model as a Hugging Face folder; ``target`` appears when it is complete and on disk.

    Collective over all ranks; rank 0 writes. It holds one parameter and the unwritten part of the current
    file (:data:`MAX_FILE_BYTES`) in memory, never the whole model twice.

    Args:
        source: the folder whose ``config.json`` and tokenizer files are copied.
        target: the new folder; an existing, incomplete one is replaced.
    """
    if parallel_state.get_data_parallel_rank() == 0:
        tensors = _gather(model, shape)
        if dist.get_rank() == 0:
            _write(tensors, source, target)
        else:
            for _ in tensors:
                pass


def _umask() -> int:
    """The process's file mode creation mask: reading it means setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _write(tensors: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    held: dict[str, torch.Tensor] = {}
    weight_map: dict[str, int] = {}
    size = total = files = 0

    def flush() -> None:
        nonlocal size, files
        files += 1
        part = temporary / f"part-{files}"
        save_file(held, part, metadata={"format": "pt"})
        part.chmod(0o666 & ~_umask())  # safetensors makes it private; workers may run as other users
        weight_map.update(dict.fromkeys(held, files))
        held.clear()
        size = 0

    dtype = torch.float32
    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if held and size + bytes_ > MAX_FILE_BYTES:
            flush()
        held[name], dtype = tensor, tensor.dtype
        size += bytes_
        total += bytes_
    flush()
    if files == 1:
        (temporary / "part-1").rename(temporary / "model.safetensors")
    else:
        names = {i: f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)}
        for i, name in names.items():
            (temporary / f"part-{i}").rename(temporary / name)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {k: names[i] for k, i in weight_map.items()},
        }
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in source.iterdir():
        made_here = file.name in ("config.json", "model.safetensors.index.json")
        if file.is_file() and file.suffix in COPIED and not made_here:
            shutil.copyfile(file, temporary / file.name)
    durable_rename(temporary, target)


def durable_rename(temporary: Path, target: Path) -> None:
    """Sync every file below ``temporary``, then rename it; replaces an older ``target``."""
    for folder, _, names in os.walk(temporary):
        for path in [*(Path(folder) / name for name in names), Path(folder)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
