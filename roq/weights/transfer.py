"""Weights over a process group: what the trainer's sender and a worker's engine agree on.

The sender and the ranks of one engine make up a group of their own: workers come and go, and one that dies
takes nobody along. Over a connection, line by line as JSON, a worker says hello and is told where to meet;
for every version it asks, is offered the list of tensors, and says go; then the tensors are broadcast from
rank 0, several in one buffer.

Trust the network between them: whoever knows the address (it stands in Redis) may read weights, and neither
the rendezvous nor the broadcast is encrypted.

Needs torch, which the rest of ``roq`` does not.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from roq.errors import RoqError

__all__ = [
    "BUCKET_BYTES",
    "LINE_BYTES",
    "Ask",
    "Done",
    "Go",
    "Group",
    "Hello",
    "Meeting",
    "Offer",
    "Tensor",
    "TransferFailed",
    "buckets",
    "check",
    "decode",
    "encode",
    "notice_death",
    "receive",
    "send",
    "split_address",
]

BUCKET_BYTES = 64 << 20  # what a sender puts together at most; two are under way
LINE_BYTES = 64 << 20  # the offer of a model with a million tensors
MEET = timedelta(seconds=10)  # for the others of a group to come: an engine stands still meanwhile
BUFFER = timedelta(seconds=60)  # for one buffer
SILENT_S = 20  # a host that does not acknowledge for so long has vanished
_ALIGNED = 16  # bytes: a tensor in a buffer is viewed as its own type

_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

T = TypeVar("T")

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class TransferFailed(RoqError):
    """Weights did not come over the network; they can be read from their files."""


# ---- the messages --------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """Worker: who knows the secret may come in; ``ranks`` is the number of its engine's ranks."""

    secret: str
    ranks: int


class Meeting(msgspec.Struct, frozen=True):
    """Sender: meet as ``name`` at the rendezvous on ``port``, by ``backend``."""

    backend: str = ""
    port: int = 0
    name: str = ""
    error: str = ""


class Ask(msgspec.Struct, frozen=True):
    """Worker: what is in the folder ``name``, the last part of a version's location?"""

    name: str


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor under its Hugging Face name; ``dtype`` as torch calls it, such as "bfloat16"."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def bytes(self) -> int:
        """Its size."""
        count = 1
        for length in self.shape:
            count *= length
        return count * _dtype(self).itemsize


class Offer(msgspec.Struct, frozen=True):
    """Sender: the tensors that will come, in this order, put together up to ``bucket`` bytes.

    ``queued``: it is not this worker's turn yet; another offer follows.
    """

    tensors: list[Tensor] = []
    bucket: int = BUCKET_BYTES
    error: str = ""
    queued: bool = False


class Go(msgspec.Struct, frozen=True):
    """Worker: the engine stands still and is about to receive."""


class Done(msgspec.Struct, frozen=True):
    """Sender: all of it was sent."""


def split_address(address: str) -> tuple[str, int, str]:
    """``host:port/secret`` as its parts.

    Raises:
        TransferFailed: it is not of this form.
    """
    place, _, secret = address.rpartition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536 and secret):
        raise TransferFailed(f"{place or address!r} is not where a trainer sends weights from")
    return host.strip("[]"), int(port), secret


# ---- the group -----------------------------------------------------------------------------------


class Group:
    """The sender (rank 0) and the ranks of one engine.

    By gloo it is made when all have come, :data:`MEET` at most, and a peer that dies is noticed at once.
    By NCCL the first broadcast brings them together, and a dead peer is noticed after :data:`BUFFER`.

    Args:
        backend, port, name: as the :class:`Meeting` says. host: the sender's, where they meet.
        rank: 0 is the sender. size: of the group.
        address: of this host on the network that leads to the other, for gloo.
    """

    def __init__(
        self, backend: str, host: str, port: int, name: str, *, rank: int, size: int, address: str
    ) -> None:
        store = PrefixStore(name, _rendezvous(host, port))
        self._group: Any
        if backend == "nccl":
            self._group = _nccl(store, rank, size)
        else:
            kind: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
            options = kind._Options()
            options._timeout = MEET
            options._devices = [kind.create_device(hostname=address, lazy_init=False)]
            self._group = kind(store, rank, size, options)
            self._group.set_timeout(BUFFER)
        self._backend = backend

    def broadcast(self, buffer: torch.Tensor) -> None:
        """From rank 0 to all others; ``buffer`` may be used again when this returns.

        Raises:
            RuntimeError: a peer died, or did not come within :data:`BUFFER`.
        """
        self._group.broadcast(buffer, 0).wait()
        _synchronize(buffer.device)

    def close(self) -> None:
        """Leave; those who wait in the group fail."""
        if self._backend == "nccl":
            self._group.abort()
        self._group = None


def _rendezvous(host: str, port: int) -> Any:
    """Torch bounds the answers of its store, but not the first greeting: a frozen host never gives it.

    Nor does a name server that is away, which it asks for the names of addresses.
    """
    made: Future[Any] = Future()

    def connect() -> None:
        try:
            made.set_result(TCPStore(host, port, is_master=False, timeout=MEET))
        except Exception as error:  # noqa: BLE001 - raised by who waits
            made.set_exception(error)

    threading.Thread(target=connect, name="rendezvous", daemon=True).start()
    try:
        return made.result(MEET.total_seconds())
    except TimeoutError:
        raise TransferFailed(f"the rendezvous at {host}:{port} does not answer within {MEET}") from None


def _nccl(store: Any, rank: int, size: int) -> Any:
    """By default torch ends a process whose peer is dead; here waiting for it raises."""
    kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = kind.Options()
    options._timeout = BUFFER
    before = os.environ.get(_WAIT)
    os.environ[_WAIT] = "1"  # read when a group is made; those of vLLM itself keep the default
    try:
        return kind(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_WAIT]
        else:
            os.environ[_WAIT] = before


# ---- tensors in buffers --------------------------------------------------------------------------


def _dtype(tensor: Tensor) -> torch.dtype:
    if tensor.dtype not in _DTYPES:
        raise TransferFailed(f"{tensor.name} is of the type {tensor.dtype}, which is not sent")
    return _DTYPES[tensor.dtype]


def check(tensor: Tensor) -> None:
    """Refuse a tensor that cannot be sent.

    Raises:
        TransferFailed: it is of an unusual type.
    """
    _dtype(tensor)


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Consecutive tensors that share a buffer of at most ``limit`` bytes, each with its offset in it.

    A larger tensor goes alone. The same on every rank.
    """
    bucket: list[tuple[Tensor, int]] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((tensor, size))
        size += -(-tensor.bytes // _ALIGNED) * _ALIGNED
    if bucket:
        yield bucket


def _buffer(bucket: list[tuple[Tensor, int]], device: torch.device) -> torch.Tensor:
    last, offset = bucket[-1]
    return torch.empty(offset + last.bytes, dtype=torch.uint8, device=device)


def _part(buffer: torch.Tensor, tensor: Tensor, offset: int) -> torch.Tensor:
    return buffer[offset : offset + tensor.bytes].view(_dtype(tensor)).view(tensor.shape)


def _pack(source: Mapping[str, torch.Tensor], offer: Offer, device: torch.device) -> Iterator[torch.Tensor]:
    for bucket in buckets(offer.tensors, offer.bucket):
        buffer = _buffer(bucket, device)
        for tensor, offset in bucket:
            _part(buffer, tensor, offset).copy_(source[tensor.name])
        _synchronize(device)
        yield buffer


def send(group: Group, source: Mapping[str, torch.Tensor], offer: Offer, device: torch.device) -> None:
    """Broadcast what was offered."""
    for buffer in _ahead(_pack(source, offer, device)):
        group.broadcast(buffer)


def receive(group: Group, offer: Offer, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """What :func:`send` sends, for use on the current stream. Every buffer is a new one."""

    def buffers() -> Iterator[tuple[list[tuple[Tensor, int]], torch.Tensor]]:
        for bucket in buckets(offer.tensors, offer.bucket):
            buffer = _buffer(bucket, device)
            group.broadcast(buffer)
            yield bucket, buffer

    for bucket, buffer in _ahead(buffers()):
        if (
            buffer.is_cuda
        ):  # made on another thread's stream: not to be reused before this one is done with it
            buffer.record_stream(torch.cuda.current_stream(device))
        yield from ((tensor.name, _part(buffer, tensor, offset)) for tensor, offset in bucket)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """``items``, each made in another thread while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="transfer") as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ---- lines ---------------------------------------------------------------------------------------


def notice_death(connection: socket.socket) -> None:
    """Have a connection fail soon after the other host has vanished; by default that takes hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENT_S // 2),
        ("TCP_KEEPINTVL", SILENT_S // 4),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def decode(line: bytes, kind: type[Any]) -> Any:
    """A message.

    Raises:
        TransferFailed: the other side left, or says something else.
    """
    if not line.endswith(b"\n"):
        raise TransferFailed("the other side has left")
    try:
        return cast("Any", msgspec.json.decode(line, type=kind))
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"the other side says something else than expected: {error}") from None


def encode(message: msgspec.Struct) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"
