"""Weight senders for the engine's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roq.weights import broadcast
from roq_worker.engine import Engine
from tests.workers.engine_support import PROMPT, collect, largest_difference, reference


class Process:
    """A sender process as the trainer starts it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "roq_trainer.sender", "--folder", str(folder)]
        self._process = subprocess.Popen(
            [*command, "--backend", "gloo", "--host", "127.0.0.1"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def breaking_sender(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], str]]:
    """A sender that dies after a number of buffers of 4 KiB each."""
    from roq_trainer import sender as sending

    server = sending._Server("127.0.0.1", folder, "gloo", 2)
    server.bucket = 4096
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    send = broadcast.Group.broadcast

    def start(after: int) -> str:
        sent = 0

        def some(group: broadcast.Group, buffer: Any) -> None:
            nonlocal sent
            if sent >= after:
                raise OSError("the cable was pulled")
            sent += 1
            send(group, buffer)

        monkeypatch.setattr(broadcast.Group, "broadcast", some)
        return f"127.0.0.1:{server.server_address[1]}/{server.secret}"

    yield start
    server.shutdown()
    server.server_close()
    thread.join()


def holds(engine: Engine, run: Callable[[Any], Any], model: Path) -> bool:
    """Return True if the engine samples with the weights of a model."""
    draft = run(collect(engine, PROMPT, seed=4))
    return largest_difference(draft.logprobs, reference(model, PROMPT, draft.tokens)) < 1e-4
