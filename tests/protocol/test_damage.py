"""Keys that hold what no transition writes: refused, at once, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roq import RunConfig, Scheduler
from roq.errors import Damaged
from tests.conftest import Server
from tests.protocol.damage import contents, fuzz
from tests.protocol.play import trajectory


def test_random_damage_is_refused_and_hurts_no_other_run(server: Server) -> None:
    """`python -m tests.protocol.damage` tries more."""
    assert [problem for seed in range(20) for problem in fuzz(server, seed)] == []


STATE = [
    ("version", "1e12"),
    ("version", "2"),
    ("version", "-1"),
    ("frontier", "5"),
    ("frontier", "0.5"),
    ("checkpoint", "9"),
    ("next_token", "x"),
    ("next_group", ""),
]


@pytest.mark.parametrize(("field", "value"), STATE)
def test_a_state_that_cannot_be_is_refused(sched: Scheduler, server: Server, field: str, value: str) -> None:
    sched.create(RunConfig(eta=1, batch_size=1, group_size=1))
    claim = sched.reserve("w0", 0, 1).reservations[0]
    server.redis.hset(sched._operations.keys["state"], field, value)
    before = contents(server.redis, "test")
    every: list[Callable[[], object]] = [
        lambda: sched.complete(claim, trajectory()),
        lambda: sched.reserve("w0", 0, 1),
        lambda: sched.take("t0"),
        lambda: sched.publish(1, "w", "t0"),
        lambda: sched.drop(claim.group, "x"),
        sched.status,
        sched.verify,
    ]
    for call in every:
        with pytest.raises(Damaged, match=field):
            call()
    assert contents(server.redis, "test") == before


def test_what_was_written_before_the_damage_showed_is_undone(sched: Scheduler, server: Server) -> None:
    """The group leaves its slot before the index of versions turns out to be broken."""
    sched.create(RunConfig(eta=1, batch_size=2, group_size=1))
    claims = sched.reserve("w0", 0, 4).reservations
    server.redis.delete(sched._operations.keys["reserved_by_version"])
    before = contents(server.redis, "test")
    with pytest.raises(Damaged, match="index"):
        sched.drop(claims[0].group, "x")
    assert contents(server.redis, "test") == before
