"""``roq up`` with light stand-ins for the engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import environment


@pytest.fixture
def start_up() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``roq up`` with stand-in processes, in the background: ``start_up(job_file, *trainer_arguments)``."""
    started: list[subprocess.Popen[str]] = []

    def start(config: Path, *trainer: object) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(Path(__file__).with_name("up_driver.py")),
            str(config),
            *map(str, trainer),
        ]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=10)
