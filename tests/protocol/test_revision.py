"""A run belongs to the revision of the library that created it."""

from __future__ import annotations

import pytest

from roq import ConfigMismatch, RunConfig, Scheduler
from roq.protocol.keys import keys_of
from roq.protocol.library import REVISION
from tests.conftest import Server

CONFIG = RunConfig(eta=1, batch_size=2)


@pytest.mark.parametrize("revision", [None, REVISION - 1, REVISION + 1])
def test_a_run_of_another_revision_is_refused(sched: Scheduler, server: Server, revision: int | None) -> None:
    """Revision 1 wrote no revision into the state."""
    sched.create(CONFIG)
    state = keys_of(sched.run)["state"]
    if revision is None:
        server.redis.hdel(state, "revision")
    else:
        server.redis.hset(state, "revision", revision)
    before = server.redis.hgetall(state)
    for call in (
        lambda: sched.create(CONFIG),
        lambda: sched.reserve("w0", 0, 1),
        lambda: sched.take("t0"),
        sched.status,
        sched.verify,
        sched.audit,
    ):
        with pytest.raises(ConfigMismatch, match=f"revision {revision or 1}"):
            call()
    assert server.redis.hgetall(state) == before


def test_a_run_of_this_revision_is_served(sched: Scheduler) -> None:
    sched.create(CONFIG)
    assert sched.create(CONFIG) is False
    assert sched.verify() == []
