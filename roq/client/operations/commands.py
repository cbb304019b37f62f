"""The steps that operations yield, and helpers to encode and decode them."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from roq.config import RUN_NAME
from roq.errors import ConfigError, Invalid, UnknownRun
from roq.protocol.functions import Function
from roq.protocol.keys import keys_of

__all__ = [
    "FETCH",
    "PAGE",
    "REASON_CHARACTERS",
    "Call",
    "Command",
    "Left",
    "Many",
    "Operation",
    "Steps",
    "as_json",
    "as_text",
    "call",
    "pairs",
    "reason_text",
]

T = TypeVar("T")

FETCH = 128  # records or payloads read with one command
PAGE = 1000  # events or dead letters read with one command
REASON_CHARACTERS = 2000  # characters of a reason or an error


class Call(msgspec.Struct, frozen=True):
    """A call of a library function; the driver adds the request identity, if the function takes one."""

    function: Function
    values: tuple[str | bytes, ...]


class Many(msgspec.Struct, frozen=True):
    """Calls sent together; the answer is a list of replies and refusals (redis-py errors)."""

    calls: tuple[Call, ...]


class Command(msgspec.Struct, frozen=True):
    """A plain Redis command that reads."""

    args: tuple[str | bytes | int, ...]


Operation = Generator[Call | Many | Command, Any, T]


class Left(msgspec.Struct):
    """The amount of work that a call of bounded size leaves for the next one."""

    left: int


class Steps:
    """Base of the operations on one run."""

    def __init__(self, run: str) -> None:
        if not RUN_NAME.fullmatch(run):  # it becomes part of every key
            raise ConfigError(f"run = {run[:80]!r} must be letters, digits, '.', '_' or '-', at most 64")
        self.run = run
        self.by = _who()
        self.keys = keys_of(run)
        self._packed_keys = [key.encode() for key in self.keys.values()]  # sent with every call

    def wire(self, command: Call | Command, request: str = "") -> tuple[str | bytes | int, ...]:
        """The Redis command for a step; ``request`` is the call's identity, if the function takes one."""
        if isinstance(command, Command):
            return command.args
        function = command.function
        return (
            "FCALL_RO" if function.reads else "FCALL",
            f"roq_{function.name}",
            len(self._packed_keys),
            *self._packed_keys,
            *((request,) if function.once else ()),
            *command.values,
        )

    def _check_exists(self) -> Operation[None]:
        """Tell a run that holds nothing yet from one that does not exist."""
        if (yield Command(("HGET", self.keys["config"], "eta"))) is None:
            raise self._unknown()

    def _unknown(self) -> UnknownRun:
        return UnknownRun(f"there is no run {self.run!r} on this server; create it first (roq init)")

    def _ask(self, function: Function, reply: type[T], *values: object) -> Operation[T]:
        answer = yield call(function, *values)
        return msgspec.json.decode(answer, type=reply, strict=False)  # rewards are stored as text


def call(function: Function, *values: object) -> Call:
    return Call(function, tuple(v if isinstance(v, bytes) else _encoded(as_text(v)) for v in values))


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # for example a path that is not UTF-8
        raise Invalid(f"{text[:80]!a} cannot be stored: it is not text") from None


def as_json(what: str, value: object, most: int) -> str:
    """A caller's object as JSON of at most ``most`` bytes, to be stored in Redis."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"{what} cannot be written as JSON: {error}") from None
    if len(text) > most:
        raise Invalid(f"{what}: {len(text)} bytes of JSON exceed the limit of {most}; shorten it")
    return text


def as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def reason_text(text: str) -> str:
    """A reason as stored: truncated, and valid UTF-8."""
    return text[:REASON_CHARACTERS].encode(errors="replace").decode() or "no reason given"


def pairs(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[str, str]:
    if isinstance(flat, Mapping):
        return {key.decode(): value.decode() for key, value in flat.items()}
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _who() -> str:
    """The user and host, for the events of an operator's calls."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
