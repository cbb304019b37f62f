import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roq.processes import finish, read_records
from roq.run.embedded_server import EmbeddedServer
from roq.run.supervisor import running_supervisor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket; what was started in its run folder is ended."""
    path = Path(tempfile.mkdtemp(prefix="roqt"))
    yield path
    run = path / "run"
    if (up := running_supervisor(run)) is not None:
        finish(up)
    for record in read_records(run / "pids.json").values():
        finish(record)
    for server in (EmbeddedServer(run), EmbeddedServer(path / "server")):
        server.kill()
    shutil.rmtree(path)


@pytest.fixture
def url(folder: Path) -> str:
    """A real server of its own."""
    server = EmbeddedServer(folder / "server")
    server.start()
    return server.url


def make_model(path: Path, head_dim: int = 32) -> Path:
    """A model folder that looks whole: the tests here never load it."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text(json.dumps({"hidden_size": 64, "head_dim": head_dim}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return path


Write = Callable[..., Path]


@pytest.fixture
def job(folder: Path) -> Write:
    """Write a job file, its model and its prompts; ``protocol__eta=2`` replaces a value."""
    make_model(folder / "model")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(name: str = "job.toml", **changes: Any) -> Path:
        table: dict[str, dict[str, Any]] = {
            "run": {"name": "demo", "dir": "run"},
            "protocol": {
                "eta": 1,
                "batch_size": 2,
                "group_size": 2,
                "total_steps": 6,
                "epochs": 20,
                "lease_s": 5.0,
            },
            "model": {"path": "model"},
            "data": {"file": "prompts.jsonl"},
            "reward": {"function": "roq.rewards:exact_match"},
            "rollout": {"workers": 2, "drain_s": 2.0},
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            table.setdefault(section, {})[field] = value
        text = "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
            for section, fields in table.items()
        )
        path = folder / name
        path.write_text(text)
        return path

    return write


Done = subprocess.CompletedProcess


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "workers"), str(ROOT / "trainer")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}


@pytest.fixture
def roq() -> Callable[..., Done[str]]:
    """The command line in a process of its own: ``roq("status", job_file, "--json")``."""

    def run(*arguments: object, timeout: float = 60, **env: str) -> Done[str]:
        code = "from roq.cli import main; main(prog_name='roq')"
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment() | env, check=False
        )

    return run


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
