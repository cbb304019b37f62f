"""What the trainer's sender and a worker tell each other about weights, before and after they are broadcast.

Over a connection, line by line as JSON, a worker says hello and is told where to meet (broadcast.py); for
every version it asks, is offered the list of tensors, and says go; then the tensors are broadcast.

Trust the network between them: whoever knows the address (it is in Redis) can read the weights, and neither
the rendezvous nor the broadcast is encrypted.
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

BUCKET_BYTES = 64 << 20  # what a sender puts together at most; two are under way
LINE_BYTES = 64 << 20  # the offer of a model with a million tensors
SILENT_S = 20  # a host that does not acknowledge for so long has vanished


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
    """A tensor under its Hugging Face name; ``dtype`` as safetensors names it, such as "BF16"."""

    name: str
    dtype: str
    shape: list[int]


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
