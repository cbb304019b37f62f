"""The process that a reward function runs in: ``python -m roq_worker.reward_process module:function``.

Frames on stdin and stdout, each a 4-byte big-endian length and a body. First it sends one frame when
it is ready (or cannot be); then for each request, a pickled ``(item, response)``, it answers with one
frame of JSON: ``{"reward": 0.5}`` or ``{"error": "…"}``. It ends when stdin does.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from roq.errors import ConfigError
from roq.rewards import RewardFunction, load_function
from roq_worker._orphans import die_with_parent

LENGTH = struct.Struct(">I")
MESSAGE = 2000  # characters of an error


def _send(pipe: BinaryIO, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def _score(function: RewardFunction, request: bytes) -> dict[str, Any]:
    try:
        item, response = pickle.loads(request)  # noqa: S301 - from our own parent only
        reward = float(function(item, response))
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises fails its call only
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        message = str(error)[:MESSAGE].encode(errors="replace").decode()
        return {"error": f"raised {type(error).__name__}: {message} ({where})"}
    if not math.isfinite(reward):
        return {"error": f"returned {reward}, which is not a finite number"}
    return {"reward": reward}


def main() -> None:
    die_with_parent()
    # The function may print: keep the pipe for frames and send its prints to the log.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    try:
        function = load_function(sys.argv[1])
    except ConfigError as error:
        _send(pipe, {"error": str(error)})
        return
    _send(pipe, {"ready": True})
    process = os.getpid()
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        answer = _score(function, requests.read(LENGTH.unpack(header)[0]))
        if os.getpid() != process:  # a fork that the function made and that returned: not ours to answer
            os._exit(1)
        _send(pipe, answer)


if __name__ == "__main__":
    main()
