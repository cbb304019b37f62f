"""Every interleaving of calls on small runs, to a fixed depth (``make search`` goes deeper)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roq import RunConfig
from tests.conftest import Server
from tests.protocol.search import search

SMALL = {
    "eta0": (RunConfig(eta=0, batch_size=1, max_attempts=2), 6),
    "eta1": (RunConfig(eta=1, batch_size=2, max_attempts=2), 4),
    "oversampled": (RunConfig(eta=1, batch_size=1, buffer_slots=2, max_attempts=2), 4),
    "eta2": (RunConfig(eta=2, batch_size=2, buffer_slots=3, max_attempts=2, on_drop="discard"), 3),
    "groups": (RunConfig(eta=1, batch_size=1, group_size=2, max_attempts=2, filter_zero_variance=True), 4),
    "candidates": (RunConfig(eta=0, batch_size=1, group_size=1, group_candidates=2, max_attempts=2), 4),
    "post-processed": (RunConfig(eta=0, batch_size=1, max_attempts=2, post_process="m:f"), 5),
    "ending": (RunConfig(eta=1, batch_size=1, prompts=2, max_attempts=1), 5),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_interleaving(name: str, servers: Callable[[str], Server]) -> None:
    config, depth = SMALL[name]
    found = search(servers("valkey").redis, config, depth)
    assert found.broken == []
    assert found.levels[-1] > 0
    assert found.refused > 0
