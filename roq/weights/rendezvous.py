"""The rendezvous of a group: how its ranks exchange their addresses.

Torch's TCPStore is open to everyone who reaches its port: a stranger could fill its memory, or join a group
in place of a rank and replace the weights. Here the sender keeps the keys of each group in a :class:`Table`.
A rank reads and writes them over a connection to the sender that starts with the group's unguessable name
(:class:`roq.weights.messages.Join`), which only a worker that knows the run's secret gets.

Needs torch, unlike the rest of ``roq``.
"""

# torch's stubs leave the store's methods open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from roq.errors import TransferFailed
from roq.weights import messages
from roq.weights.messages import Found, Key

__all__ = ["Rendezvous", "Table", "connect"]

MOST_KEYS = 4096  # of a group; gloo needs one for each rank, NCCL a few
MOST_BYTES = 4 << 20  # of a group's values; gloo's grow with the square of the ranks
LOOK_S = 0.01  # between two looks for a key that is not there yet


class Table:
    """The keys of one group, in the sender."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, asked: Key) -> Found:
        """Read, write, add to or delete a key."""
        with self._lock:
            match asked.op:
                case "set":
                    return self._set(asked.key, asked.value)
                case "add":
                    number = int(self._values.get(asked.key, b"0")) + asked.number
                    return self._set(asked.key, str(number).encode())
                case "get":
                    return Found(self._values.get(asked.key))
                case "delete":
                    return Found(self._values.pop(asked.key, None))

    def _set(self, key: str, value: bytes) -> Found:
        size = len(value) + sum(len(other) for name, other in self._values.items() if name != key)
        if size > MOST_BYTES or (key not in self._values and len(self._values) >= MOST_KEYS):
            return Found(error="the group has too many keys, or too large ones")
        self._values[key] = value
        return Found(value)


class Rendezvous(dist.Store):  # type: ignore[name-defined, misc]
    """A group's keys as torch wants them; ``ask`` answers one request. Used by several of torch's threads."""

    def __init__(self, ask: Callable[[Key], Found], limit: timedelta) -> None:
        super().__init__()
        self._ask, self._limit = ask, limit

    def _answer(self, asked: Key) -> bytes | None:
        found = self._ask(asked)
        if found.error:
            raise TransferFailed(found.error)
        return found.value

    def set(self, key: str, value: str | bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write a key."""
        self._answer(Key("set", key, value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Read a key, once it is there."""
        return self._awaited(key, self._limit)

    def add(self, key: str, number: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to a number."""
        return int(self._answer(Key("add", key, number=number)) or b"0")

    def check(self, keys: Sequence[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return True if all keys are there."""
        return all(self._answer(Key("get", key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:  # pyright: ignore
        """Wait until all keys are there."""
        for key in keys:
            self._awaited(key, limit or self._limit)

    def delete_key(self, key: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Delete a key."""
        return self._answer(Key("delete", key)) is not None

    def _awaited(self, key: str, limit: timedelta) -> bytes:
        deadline = time.monotonic() + limit.total_seconds()
        while (value := self._answer(Key("get", key))) is None:
            if time.monotonic() > deadline:
                raise TransferFailed(f"a rank of the group did not come within {limit}")
            time.sleep(LOOK_S)
        return value


class _Line:
    """A rank's connection to the sender."""

    def __init__(self, host: str, port: int, group: str, limit: timedelta) -> None:
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), limit.total_seconds())
        self._lines = self._socket.makefile("rb")
        messages.notice_death(self._socket)
        try:
            self._send(messages.Join(group))
        except BaseException:
            self.close()
            raise

    def _send(self, message: Any) -> Found:
        self._socket.sendall(messages.encode(message))
        found = messages.decode(self._lines.readline(messages.KEY_BYTES), Found)
        if found.error:
            raise TransferFailed(found.error)
        return found

    def ask(self, asked: Key) -> Found:
        with self._lock:
            return self._send(asked)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def connect(host: str, port: int, group: str, limit: timedelta) -> tuple[Rendezvous, Callable[[], None]]:
    """Join a group as one of an engine's ranks; also returns how to disconnect.

    Raises:
        TransferFailed: the sender does not answer within ``limit``, or has no such group.
    """
    try:
        line = _Line(host, port, group, limit)
    except OSError as error:
        raise TransferFailed(f"the rendezvous at {host}:{port} does not answer: {error}") from None
    return Rendezvous(line.ask, limit), line.close
