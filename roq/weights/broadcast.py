"""Broadcast weights over a process group: rank 0 is the sender, the others are the ranks of one engine.

Each engine has a separate group with the sender: workers come and go, and a dying one affects no other.
Several tensors share one buffer, whose SHA-256 the receiver gets over the authenticated rendezvous and checks
before the engine sees a tensor of it. The messages before and after are in messages.py.

Needs torch, unlike the rest of ``roq``.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist

from roq.errors import TransferFailed
from roq.weights.messages import Offer, Tensor
from roq.weights.rendezvous import Rendezvous, Table, connect

__all__ = ["DTYPES", "Group", "buckets", "dtype_of", "receive", "send"]

MEET = timedelta(seconds=10)  # to join a group, while the engine is paused
BUFFER = timedelta(seconds=60)  # for one buffer
_ALIGNED = 16  # bytes, so that a tensor in a buffer can be viewed as its type

KEPT = 64  # digests of past buffers that stay for slower ranks; a broadcast holds all within one buffer

_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

T = TypeVar("T")

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The supported types, by their safetensors names."""


class Group:
    """The sender (rank 0) and the ranks of one engine.

    With gloo, the constructor waits for all ranks, at most :data:`MEET`, and a dead peer is noticed at once.
    With NCCL, the first broadcast connects them, and a dead peer is noticed after :data:`BUFFER`.

    Args:
        backend, name: see :class:`roq.weights.messages.Meeting`. host, port: the sender's.
        rank: 0 is the sender. size: of the group.
        address: of this host on the network of the others, for gloo.
        table: the group's keys, in the sender itself.

    Raises:
        TransferFailed: the sender does not answer, or has no such group.
    """

    def __init__(
        self,
        backend: str,
        host: str,
        port: int,
        name: str,
        *,
        rank: int,
        size: int,
        address: str,
        table: Table | None = None,
    ) -> None:
        self._group: Any = None
        self._buffers = 0
        if table is None:
            self._store, self._disconnect = connect(host, port, name, MEET)
        else:
            self._store, self._disconnect = Rendezvous(table.answer, MEET), lambda: None
        try:
            self._join(backend, self._store, rank, size, address)
        except BaseException:
            self._disconnect()
            raise

    def _join(self, backend: str, store: Rendezvous, rank: int, size: int, address: str) -> None:
        self._backend = backend
        if backend == "nccl":
            self._group = _nccl(store, rank, size)
        else:
            kind: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
            options = kind._Options()
            options._timeout = MEET
            options._devices = [kind.create_device(hostname=address, lazy_init=False)]
            self._group = kind(store, rank, size, options)
            self._group.set_timeout(BUFFER)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast from rank 0 to all others; ``buffer`` may be reused when this returns.

        Raises:
            RuntimeError: a peer died, or did not join within :data:`BUFFER`.
        """
        self._group.broadcast(buffer, 0).wait()
        _synchronize(buffer.device)

    def vouch(self, buffer: torch.Tensor) -> None:
        """Tell the receivers the digest of the next buffer."""
        self._store.set(f"sha256/{self._buffers}", _digest(buffer))
        self._store.delete_key(f"sha256/{self._buffers - KEPT}")
        self._buffers += 1

    def check(self, buffer: torch.Tensor) -> None:
        """Compare a received buffer with the digest that the sender gave.

        Raises:
            TransferFailed: it is not what was sent.
        """
        expected = self._store.get(f"sha256/{self._buffers}")
        self._buffers += 1
        if _digest(buffer) != expected:
            raise TransferFailed(
                "the weights that arrived are not those that were sent (their SHA-256 differs)"
            )

    def close(self) -> None:
        """Leave the group; ranks that wait in it fail."""
        if self._backend == "nccl":
            self._group.abort()
        self._group = None
        self._disconnect()


def _nccl(store: Any, rank: int, size: int) -> Any:
    """An NCCL group that raises when a peer is dead; by default torch ends the process."""
    kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = kind.Options()
    options._timeout = BUFFER
    before = os.environ.get(_WAIT)
    os.environ[_WAIT] = "1"  # read when a group is created; vLLM's groups keep the default
    try:
        return kind(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_WAIT]
        else:
            os.environ[_WAIT] = before


# ---- tensors in buffers --------------------------------------------------------------------------


def _digest(buffer: torch.Tensor) -> bytes:
    return hashlib.sha256(cast("Any", buffer.cpu().numpy())).digest()


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The torch type of a tensor.

    Raises:
        TransferFailed: tensors of this type cannot be sent.
    """
    if tensor.dtype not in DTYPES:
        raise TransferFailed(f"{tensor.name} has the type {tensor.dtype}, which cannot be sent")
    return DTYPES[tensor.dtype]


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * dtype_of(tensor).itemsize


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Consecutive tensors that share a buffer of at most ``limit`` bytes, each with its offset in it.

    A larger tensor gets a separate buffer. The result is the same on every rank.
    """
    bucket: list[tuple[Tensor, int]] = []
    size = 0
    for tensor in tensors:
        if bucket and size + _bytes(tensor) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((tensor, size))
        size += -(-_bytes(tensor) // _ALIGNED) * _ALIGNED
    if bucket:
        yield bucket


def _buffer(bucket: list[tuple[Tensor, int]], device: torch.device) -> torch.Tensor:
    last, offset = bucket[-1]
    return torch.empty(offset + _bytes(last), dtype=torch.uint8, device=device)


def _part(buffer: torch.Tensor, tensor: Tensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + _bytes(tensor)].view(dtype_of(tensor)).view(tensor.shape)


def _pack(source: Mapping[str, torch.Tensor], offer: Offer, device: torch.device) -> Iterator[torch.Tensor]:
    for bucket in buckets(offer.tensors, offer.bucket):
        buffer = _buffer(bucket, device)
        for tensor, offset in bucket:
            _part(buffer, tensor, offset).copy_(source[tensor.name])
        _synchronize(device)
        yield buffer


def send(group: Group, source: Mapping[str, torch.Tensor], offer: Offer, device: torch.device) -> None:
    """Broadcast the offered tensors."""
    for buffer in _ahead(_pack(source, offer, device)):
        group.vouch(buffer)
        group.broadcast(buffer)


def receive(group: Group, offer: Offer, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive what :func:`send` sends, for use on the current stream. Every buffer is a new one."""

    def buffers() -> Iterator[tuple[list[tuple[Tensor, int]], torch.Tensor]]:
        for bucket in buckets(offer.tensors, offer.bucket):
            buffer = _buffer(bucket, device)
            group.broadcast(buffer)
            group.check(buffer)
            yield bucket, buffer

    for bucket, buffer in _ahead(buffers()):
        if buffer.is_cuda:
            # Created on another thread's stream: do not reuse it before the current stream is done with it.
            buffer.record_stream(torch.cuda.current_stream(device))
        yield from ((tensor.name, _part(buffer, tensor, offset)) for tensor, offset in bucket)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """``items``, each produced in another thread while the previous one is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="transfer") as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
