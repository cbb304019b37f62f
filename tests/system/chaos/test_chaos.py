"""A short chaos run (``make chaos`` for a long one)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.chaos.driver import chaos
from tests.system.chaos.worker import LEASE_S


@pytest.mark.slow
def test_nothing_is_lost(tmp_path: Path) -> None:
    outcome = chaos(tmp_path, seed=11, seconds=40, gap_s=0.8)
    assert outcome.problems == []
    assert outcome.kills >= 10
    assert outcome.steps > 0
    assert outcome.reissued > 0
    assert outcome.fates["trained"] == outcome.steps * 16
    assert max(outcome.staleness) <= 2
    assert outcome.detection_s
    # The median is what the protocol decides; single kills meet a server that is down, or a starved machine.
    assert outcome.detection_s[len(outcome.detection_s) // 2] <= 2 * LEASE_S
