"""The example of the public package runs as it stands."""

from __future__ import annotations

import doctest
import shutil
from pathlib import Path

import pytest

import roq.events

ARCHIVE = Path(__file__).parents[1] / "sim/data/gcd-eta1.jsonl.gz"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ARCHIVE, tmp_path / "events.jsonl.gz")
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(roq.events)
    assert done.attempted
    assert not done.failed
