"""Checkpoints: model, optimizer and the number of completed steps, in a folder that is complete or absent.

The format is Megatron's distributed checkpoint, so a run may resume with another tensor- or
pipeline-parallel split. A step has no randomness (dropout is 0), so there is no RNG state.
"""

from __future__ import annotations

import queue
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from roq.errors import StateLost
from roq_trainer.weights import durable_rename

__all__ = ["newest", "restore", "save", "to_resume"]

# Megatron passes write results through a manager process, for saves in the background. Here saves block, so
# a plain queue is enough. The manager process (270 MB) takes seconds to start and would outlive a killed
# trainer.
filesystem_async._results_queue = queue.Queue()

_NAME = re.compile(r"step_(\d{8})")
# Only read where ranks share the optimizer's state, which is on GPUs: not yet run there.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def newest(root: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    found = _complete(root)
    return found[-1] if found else None


def to_resume(root: Path, version: int, covered: int) -> Path | None:
    """The checkpoint to resume from, given what the server knows; None is the base model.

    Usually the newest. When the server is behind it, Redis has lost its last moments: then the newest one
    that the server can follow, since the batches from there on are still kept and are trained again.

    Args:
        root: the folder of checkpoints. version: what the server says is published. covered: the
            newest checkpoint that it knows of; earlier batches are gone.

    Raises:
        StateLost: the server knows less than every checkpoint.
    """
    found = [(int(path.name[-8:]), path) for path in _complete(root)]
    if not found:
        return None
    known = [(steps, path) for steps, path in found if covered <= steps <= version]
    if known:
        return known[-1][1]
    if found[-1][0] > version > covered == 0:
        return None  # every batch from the first on is still kept
    raise StateLost(
        f"{root} has checkpoints of {', '.join(str(steps) for steps, _ in found)} updates but the server "
        f"knows of {version} and keeps the batches from {covered} on: Redis lost data. Restore its "
        "append-only file, or move the run's folder away and begin a new run under another name"
    )


def _complete(root: Path) -> list[Path]:
    return [path for path in _named(root) if (path / "metadata.json").is_file()]


def _named(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("step_*") if _NAME.fullmatch(path.name))


def _state(model: DistributedDataParallel, optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    sharded: dict[str, Any] = model.module.sharded_state_dict(  # type: ignore[operator]
        metadata=dict(_METADATA)
    )
    state = optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=dict(_METADATA))
    return {"model": sharded, "optimizer": state}


def save(
    root: Path, step: int, model: DistributedDataParallel, optimizer: MegatronOptimizer, keep: int
) -> None:
    """Write the state after ``step`` completed steps; keep only the ``keep`` newest checkpoints. Collective.

    On return the checkpoint is on disk under its final name; only then may it be reported to the scheduler.
    """
    target = root / f"step_{step:08d}"
    temporary = root / f".tmp-{target.name}"
    if dist.get_rank() == 0:
        for left in root.glob(".tmp-*"):
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    dist.barrier()
    state = _state(model, optimizer, loading=False) | {"step": step}
    dist_checkpointing.save(state, str(temporary), content_metadata=dict(_METADATA))
    dist.barrier()
    if dist.get_rank() == 0:
        durable_rename(temporary, target)
        for old in _named(root)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def restore(path: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> int:
    """Load a checkpoint into model and optimizer; returns its completed steps. Collective."""
    state: dict[str, Any] = dist_checkpointing.load(  # type: ignore[assignment]
        _state(model, optimizer, loading=True), str(path)
    )
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
