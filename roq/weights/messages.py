"""The messages between the trainer's sender and a worker, before and after a broadcast of weights.

Each message is a line of JSON. A worker sends Hello and gets the name of its engine's group; each rank opens
another connection, sends Join and then reads and writes the group's keys (rendezvous.py). For every version
the worker sends Ask, gets the offered tensors and sends Go; then the tensors are broadcast.

Nothing is encrypted: a process that can read the network's packets can read the secret and the weights. One
that can only connect cannot join a group or change weights: their digests are sent over these connections.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec

from roq.errors import TransferFailed

__all__ = [
    "BUCKET_BYTES",
    "KEY_BYTES",
    "LINE_BYTES",
    "Ask",
    "Done",
    "Found",
    "Go",
    "Hello",
    "Join",
    "Key",
    "Meeting",
    "Offer",
    "Tensor",
    "decode",
    "encode",
    "notice_death",
    "split_address",
]

BUCKET_BYTES = 64 << 20  # size limit of a buffer; two are in flight
KEY_BYTES = 1 << 20  # a key and its value, which for gloo holds an address for each rank
LINE_BYTES = 64 << 20  # the offer of a model with a million tensors
SILENT_S = 20  # a host that does not acknowledge for this long is gone


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Worker: authenticate with the secret; ``ranks`` is the number of its engine's ranks."""

    secret: str
    ranks: int


class Meeting(msgspec.Struct, frozen=True):
    """Sender: join the group ``name``, an unguessable one, at this same address, with ``backend``."""

    backend: str = ""
    name: str = ""
    error: str = ""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Rank: the connection is for the keys of this group, until it ends."""

    group: str


class Key(msgspec.Struct, frozen=True):
    """Rank: read, write, add ``number`` to, or delete a key of the group."""

    op: Literal["set", "get", "add", "delete"]
    key: str
    value: bytes = b""
    number: int = 0


class Found(msgspec.Struct, frozen=True):
    """Sender: the key's value, None if there is none; the answer to Join is empty."""

    value: bytes | None = None
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


def decode(line: bytes, kind: Any) -> Any:
    """Decode a line as a message of this kind.

    Raises:
        TransferFailed: the connection was closed, or the line is another message.
    """
    if not line.endswith(b"\n"):
        raise TransferFailed("the connection was closed")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"unexpected message: {error}") from None


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + b"\n"
