"""Process groups, and the collectives that the loop needs besides Megatron's."""

from __future__ import annotations

import datetime as dt
import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast, get_type_hints

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from roq.config import Training
from roq.errors import ConfigError, PeerFailed
from roq_trainer.cpu import BACKEND, HAVE_CUDA, megatron_device, use_one_thread
from roq_trainer.sums import Sums

__all__ = [
    "broadcast_bytes",
    "close",
    "device",
    "leads_replica",
    "model_parallel_group",
    "on_rank0",
    "open_parallel",
    "open_world",
    "pipeline_group",
    "tensor_group",
    "world_sum",
]

P = ParamSpec("P")
T = TypeVar("T")

# Rank 0 reports to the others every few seconds while it waits for a batch. Only writing the weights of a
# large model takes minutes, so a longer silence means that a rank is gone.
TIMEOUT = dt.timedelta(minutes=30)


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if HAVE_CUDA else torch.device("cpu")


def open_world() -> None:
    """Join the other ranks as torchrun's environment describes; without it, be the only rank."""
    use_one_thread()
    if HAVE_CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(BACKEND, timeout=TIMEOUT)
    else:  # no port, no network
        dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def open_parallel(training: Training, seed: int) -> None:
    """Set up tensor, pipeline and data parallelism.

    Raises:
        ConfigError: the number of ranks is not the job's.
    """
    world = dist.get_world_size()
    if world != training.ranks:
        raise ConfigError(
            f"the job needs {training.ranks} trainer ranks (tensor {training.tensor_parallel} x pipeline "
            f"{training.pipeline_parallel} x data {training.data_parallel}) but {world} run here; start "
            f"torchrun with --nproc-per-node and --nnodes that multiply to {training.ranks}"
        )
    with megatron_device():
        parallel_state.initialize_model_parallel(
            training.tensor_parallel, training.pipeline_parallel, distributed_timeout_minutes=30
        )
        # Dropout is 0, so the tracker only has to exist. The inference kind does not need CUDA.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)


def close() -> None:
    """Leave the groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks of this rank's replica of the model; None when it is the only one."""
    group = cast("dist.ProcessGroup", parallel_state.get_model_parallel_group())
    return group if dist.get_world_size(group) > 1 else None


def tensor_group() -> dist.ProcessGroup:
    """The ranks that share this rank's layers."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline, in the order of the stages."""
    return cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())


def leads_replica() -> bool:
    """True on the rank of each replica that fetches data."""
    group = model_parallel_group()
    return group is None or dist.get_group_rank(group, dist.get_rank()) == 0


def broadcast_bytes(data: bytearray, group: dist.ProcessGroup | None = None) -> memoryview:
    """``data`` of the group's first rank, on all its ranks (default: the world)."""
    group = group or dist.group.WORLD
    assert group is not None
    if dist.get_world_size(group) == 1:
        return memoryview(data)
    root = dist.get_global_rank(group, 0)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device())
    dist.broadcast(length, root, group=group)
    size = int(length.item())
    if dist.get_rank() == root:
        buffer = torch.frombuffer(data, dtype=torch.uint8).to(device())
    else:
        buffer = torch.empty(size, dtype=torch.uint8, device=device())
    dist.broadcast(buffer, root, group=group)
    return buffer.cpu().numpy().data


def on_rank0(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function`` on rank 0 only; every rank gets its result or failure.

    Every rank calls it. On the others the arguments are ignored, and the result is decoded as the declared
    return type::

        job = on_rank0(read_job)(sched)

    Raises:
        PeerFailed: on the other ranks, when the function failed on rank 0.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if dist.get_rank() != 0:
            reply = bytes(broadcast_bytes(bytearray()))
            if reply[:1] == b"!":
                raise PeerFailed(f"rank 0 failed: {reply[1:].decode()}")
            return msgspec.msgpack.decode(reply[1:], type=get_type_hints(function)["return"])
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            broadcast_bytes(bytearray(b"!" + str(error).encode()))
            raise
        broadcast_bytes(bytearray(b"=" + msgspec.msgpack.encode(result)))
        return result

    return run


def on_any_rank(found: bool) -> bool:
    """Whether something was found on any rank; every rank calls it."""
    flag = torch.tensor(int(found), device=device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def world_sum(sums: Sums) -> Sums:
    """The sums over all ranks, on the CPU."""
    total = sums.stack().to(device())
    dist.all_reduce(total)
    return Sums(*total.cpu())
