"""The process of a user's function: ``python -m roq_worker.function_process KIND module:function``.

KIND is one of :data:`KINDS`. Stdin and stdout carry frames: a 4-byte big-endian length and a JSON body.
The process sends one frame when it is ready (or cannot start). Then it answers each request, a list of
arguments, with ``{"result": …}`` or ``{"error": "…"}``, until stdin is closed.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from roq.errors import ConfigError
from roq.postprocess import Member, Verdict
from roq.processes import die_with_parent
from roq.rewards import load_function

__all__ = ["KINDS", "LENGTH"]

LENGTH = struct.Struct(">I")
MAX_ERROR = 2000  # characters


class Unusable(Exception):
    """The function returned an invalid value."""


def _reward(function: Callable[..., Any], request: list[Any]) -> float:
    reward = float(function(*request))
    if not math.isfinite(reward):
        raise Unusable(f"returned {reward}, which is not a finite number")
    return reward


def _verdict(function: Callable[..., Any], request: list[Any]) -> Verdict:
    item, members = request
    members = msgspec.convert(members, list[Member])
    verdict = function(item, members)
    if verdict is None:
        return Verdict()
    if not isinstance(verdict, Verdict):
        raise Unusable(f"returned a {type(verdict).__name__}, not a roq.postprocess.Verdict or None")
    if verdict.advantages is not None:
        given = [float(value) for value in verdict.advantages]
        if len(given) != len(members) or not all(map(math.isfinite, given)):
            raise Unusable(f"returned advantages {given}: not one finite number for each of {len(members)}")
        verdict = msgspec.structs.replace(verdict, advantages=given)
    return verdict


KINDS = {"reward": ("reward.function", _reward), "post_process": ("protocol.post_process", _verdict)}
"""Kind of function -> the setting that names it, and how it is called."""


def _send(pipe: BinaryIO, answer: dict[str, Any]) -> None:
    body = json.dumps(answer, default=msgspec.to_builtins).encode()
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def _answer(call: Callable[..., Any], function: Callable[..., Any], request: bytes) -> dict[str, Any]:
    try:
        return {"result": call(function, json.loads(request))}
    except Unusable as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - an exception of a user's function fails only its call
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        message = str(error)[:MAX_ERROR].encode(errors="replace").decode()
        return {"error": f"raised {type(error).__name__}: {message} ({where})"}


def main() -> None:
    die_with_parent()
    # The function may print: reserve the pipe for frames and send its output to the log.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    setting, call = KINDS[sys.argv[1]]
    try:
        function = load_function(sys.argv[2], setting)
    except ConfigError as error:
        _send(pipe, {"error": str(error)})
        return
    _send(pipe, {"result": "ready"})
    process = os.getpid()
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        answer = _answer(call, function, requests.read(LENGTH.unpack(header)[0]))
        if os.getpid() != process:  # the function forked, and this is the child
            os._exit(1)
        _send(pipe, answer)


if __name__ == "__main__":
    main()
