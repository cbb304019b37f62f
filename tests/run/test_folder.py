"""The folder of a run: private unless somebody made it otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roq.errors import ConfigError
from roq.processes import make_run_folder
from roq.run.supervisor import sole_supervisor


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_a_run_s_folder_is_its_user_s_alone(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with sole_supervisor(tmp_path / "runs" / "a", os.getpid()):
            assert mode(tmp_path / "runs" / "a") == 0o700
    finally:
        os.umask(before)


def test_a_folder_made_for_a_group_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    make_run_folder(shared)
    assert mode(shared) == 0o2770


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        make_run_folder(tmp_path / "file" / "run")
