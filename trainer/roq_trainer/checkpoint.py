"""Checkpoints: model, optimizer and the number of completed steps, in a folder that is complete or absent.

The format is Megatron's distributed checkpoint, so a run may resume with another tensor- or
pipeline-parallel split; a list of the files with their checksums is next to it. A step has no randomness
(dropout is 0), so there is no RNG state.
"""

from __future__ import annotations

import errno
import logging
import queue
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from roq.errors import CheckpointDamaged, ConfigError, StateLost
from roq.text import one_line
from roq_trainer.weights import durable_rename

__all__ = ["check", "newest", "oldest_kept", "restore", "save", "to_resume"]

log = logging.getLogger("roq.trainer")

# Megatron passes write results through a manager process, for saves in the background. Here saves block, so
# a plain queue is enough. The manager process (270 MB) takes seconds to start and would outlive a killed
# trainer.
filesystem_async._results_queue = queue.Queue()

_NAME = re.compile(r"step_(\d{8})")
_FILES = "files.json"  # in each checkpoint: file -> [size, CRC-32]
# Settings of the optimizer that its state holds too: the job's count, they may change between starts.
_JOB_OWNS = ("lr", "max_lr", "min_lr", "weight_decay", "betas")
_READERS = 8  # files read at once; zlib releases the GIL
# Only read where ranks share the optimizer's state, which is on GPUs: not yet run there.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def newest(root: Path) -> Path | None:
    """The checkpoint with the most steps, or None. It may be damaged."""
    found = _named(root)
    return found[-1] if found else None


def oldest_kept(root: Path, keep: int) -> int:
    """The steps of the oldest of the ``keep`` checkpoints that a run may resume from.

    While there are fewer, the base model is one of them: 0 steps.
    """
    found = _named(root)
    return _steps(found[-keep]) if len(found) >= keep else 0


def to_resume(root: Path, version: int, covered: int) -> Path | None:
    """The newest checkpoint that is whole and that the server can follow; None is the base model.

    Damaged ones are set aside, under a name that begins with ``damaged-``, and logged. The server is behind a
    checkpoint when Redis lost its last moments: the batches from an older one on are kept and trained again.

    Args:
        root: the folder of checkpoints. version: what the server says is published. covered: the server
            has dropped the batches before this one.

    Raises:
        StateLost: the server knows less than every checkpoint.
        CheckpointDamaged: no checkpoint from ``covered`` on can be read.
    """
    found = _named(root)
    for path in reversed(found):
        if covered <= _steps(path) <= version:
            try:
                check(path)
            except CheckpointDamaged as error:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log.warning("%s; it is set aside as %s, an older one is tried", error, aside.name)
                continue
            return path
    if covered == 0 and (version > 0 or not found):
        return None  # every batch from the first on is still kept
    if found and _steps(found[0]) > version:
        raise StateLost(
            f"the server knows of {version} updates, but the oldest checkpoint in {root} is of "
            f"{_steps(found[0])}: Redis lost data. Restore its append-only file, or move the run's folder "
            "away and begin a new run under another name"
        )
    raise CheckpointDamaged(
        f"no whole checkpoint of {covered} to {version} updates is in {root}, and earlier batches are gone: "
        "checkpoints were damaged or removed there. Restore one from a backup, or begin a new run under "
        f"another name with the published weights of version {version} as [model] path"
    )


def check(path: Path) -> None:
    """Check that a checkpoint holds the files that were saved, byte for byte.

    Raises:
        CheckpointDamaged: names the checkpoint and what is wrong with it.
    """
    try:
        files = msgspec.json.decode((path / _FILES).read_bytes(), type=dict[str, tuple[int, int]])
        with ThreadPoolExecutor(_READERS) as pool:
            found = dict(zip(files, pool.map(lambda name: _sum(path / name), files), strict=True))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CheckpointDamaged(f"checkpoint {path} is damaged: {_FILES} is garbage") from None
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointDamaged(f"checkpoint {path} is damaged: {missing} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:  # permissions and the like: fix them, the data is good
            raise ConfigError(f"checkpoint {path} cannot be read: {error}") from None
        raise CheckpointDamaged(f"checkpoint {path} is damaged: {error}") from None
    for name, (size, sum_) in found.items():
        if size != files[name][0]:
            what = f"{name} has {size} bytes, {files[name][0]} were saved"
            raise CheckpointDamaged(f"checkpoint {path} is damaged: {what}")
        if sum_ != files[name][1]:
            raise CheckpointDamaged(f"checkpoint {path} is damaged: {name} is not what was saved (CRC-32)")


def _sum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = sum_ = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            size, sum_ = size + len(part), zlib.crc32(part, sum_)
    return size, sum_


def _list_files(folder: Path) -> None:
    """Write down every file of a checkpoint, to tell later whether a disk changed it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_READERS) as pool:
        sums = list(pool.map(_sum, paths))
    files = {str(path.relative_to(folder)): sum_ for path, sum_ in zip(paths, sums, strict=True)}
    (folder / _FILES).write_bytes(msgspec.json.encode(files))


def _steps(path: Path) -> int:
    return int(path.name[-8:])


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
        _list_files(temporary)
        durable_rename(temporary, target)
        found = _named(root)
        later = [path for path in found if _steps(path) > step]  # of a past that Redis lost
        kept = found[: len(found) - len(later)][-keep:]
        for other in set(found) - set(kept):
            shutil.rmtree(other)
    dist.barrier()


def restore(path: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> int:
    """Load a checkpoint into model and optimizer; returns its completed steps. Collective.

    Raises:
        CheckpointDamaged: it is whole but does not fit, such as one of another model; names it.
    """
    try:
        state: dict[str, Any] = dist_checkpointing.load(  # type: ignore[assignment]
            _state(model, optimizer, loading=True), str(path)
        )
        model.module.load_state_dict(state["model"])
        settings = [
            {name: group[name] for name in _JOB_OWNS if name in group} for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        return int(state["step"])
    except Exception as error:  # what Megatron and torch raise shares no base class
        why = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise CheckpointDamaged(f"checkpoint {path} cannot be loaded: {why}") from error
