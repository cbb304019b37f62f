"""Clients under a role of ``roq acl``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from roq import Scheduler
from tests.conftest import Server
from tests.users import As, make_users, url_of


@pytest.fixture
def acting_as(server: Server, tmp_path: Path) -> Iterator[As]:
    """Clients of the run "test" under a role: ``acting_as("worker")``."""
    make_users(server, tmp_path)
    made: list[Scheduler] = []

    def client(role: str, run: str = "test") -> Scheduler:
        made.append(Scheduler(url_of(server, tmp_path, role), run, retry_s=5))
        return made[-1]

    yield client
    for one in made:
        one.close()
