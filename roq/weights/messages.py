"""The messages between the trainer's sender and a worker, before and after a broadcast of weights.

Each message is a line of JSON. A worker sends Hello and gets the rendezvous (broadcast.py). For every version
it sends Ask, gets the offered tensors and sends Go; then the tensors are broadcast.

The network must be trusted: anyone who knows the address, which is in Redis, can read the weights, and
neither the rendezvous nor the broadcast is encrypted.
"""

from __future__ import annotations

import socket
from typing import Any, cast

import msgspec

from roq.errors import TransferFailed

__all__ = [
    "BUCKET_BYTES",
    "LINE_BYTES",
    "Ask",
    "Done",
    "Go",
    "Hello",
    "Meeting",
    "Offer",
    "Tensor",
    "decode",
    "encode",
    "notice_death",
    "split_address",
]

BUCKET_BYTES = 64 << 20  # size limit of a buffer; two are in flight
LINE_BYTES = 64 << 20  # the offer of a model with a million tensors
SILENT_S = 20  # a host that does not acknowledge for this long is gone


class Hello(msgspec.Struct, frozen=True):
    """Worker: authenticate with the secret; ``ranks`` is the number of its engine's ranks."""

    secret: str
    ranks: int


class Meeting(msgspec.Struct, frozen=True):
    """Sender: join the group ``name`` at the rendezvous on ``port``, with ``backend``."""

    backend: str = ""
    port: int = 0
    name: str = ""
    error: str = ""


class Ask(msgspec.Struct, frozen=True):
    """Worker: request the version in the folder ``name``, the last part of its location."""

    name: str


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor under its Hugging Face name; ``dtype`` as safetensors names it, such as "BF16"."""

    name: str
    dtype: str
    shape: list[int]


class Offer(msgspec.Struct, frozen=True):
    """Sender: the tensors to be sent, in this order, in buffers of at most ``bucket`` bytes.

    ``queued``: the worker must wait for its turn; another offer follows.
    """

    tensors: list[Tensor] = []
    bucket: int = BUCKET_BYTES
    error: str = ""
    queued: bool = False


class Go(msgspec.Struct, frozen=True):
    """Worker: the engine is paused and ready to receive."""


class Done(msgspec.Struct, frozen=True):
    """Sender: all of it was sent."""


def split_address(address: str) -> tuple[str, int, str]:
    """Split ``host:port/secret`` into its parts.

    Raises:
        TransferFailed: the address does not have this form.
    """
    place, _, secret = address.rpartition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536 and secret):
        raise TransferFailed(f"{place or address!r} is not the address of a trainer's sender")
    return host.strip("[]"), int(port), secret


def notice_death(connection: socket.socket) -> None:
    """Make a connection fail soon after the other host is gone; by default that takes hours."""
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
    """Decode a line as a message of this kind.

    Raises:
        TransferFailed: the connection was closed, or the line is another message.
    """
    if not line.endswith(b"\n"):
        raise TransferFailed("the connection was closed")
    try:
        return cast("Any", msgspec.json.decode(line, type=kind))
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"unexpected message: {error}") from None


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + b"\n"
