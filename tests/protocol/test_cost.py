"""A transition issues a bounded number of commands for any number of slots; memory stays bounded."""

from __future__ import annotations

import pytest

from roq import RunConfig, Scheduler
from roq.protocol.keys import keys_of
from tests.conftest import Server
from tests.protocol.play import trajectory


class Counter:
    """Commands that the server ran during a call."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def of(self, call: object) -> int:
        self.server.redis.config_resetstat()
        call()  # type: ignore[operator]
        stats = self.server.redis.info("commandstats")
        return sum(s["calls"] for name, s in stats.items() if "fcall" not in name and "config" not in name)


def commands(server: Server, batch: int, eta: int) -> dict[str, int]:
    """The most commands of each transition on a busy run, over a few steps."""
    count = Counter(server)
    worst: dict[str, int] = {}

    def note(name: str, call: object) -> None:
        worst[name] = max(worst.get(name, 0), count.of(call))

    with Scheduler(server.url, f"cost-{batch}-{eta}") as sched:
        sched.create(RunConfig(eta=eta, batch_size=batch))
        for version in range(eta + 2):
            claims = []
            while not (grant := sched.reserve("w0", version, 200)).refused:
                claims += grant.reservations
            claims += grant.reservations
            note("refused reserve", lambda version=version: sched.reserve("w0", version, 1))
            sched.release(claims[-1])
            note("reserve", lambda version=version: sched.reserve("w0", version, 1))
            note("renew", lambda version=version: sched.renew("w0", version))
            for claim in claims[:-1][::-1]:
                if sched.status().buffers[0].state == "READY":
                    break
                note("complete", lambda claim=claim: sched.complete(claim, trajectory(claim.v_traj)))
            sched.leave("w0")
            note("take", lambda: sched.take("t0"))
            note("publish", lambda version=version: sched.publish(version + 1, "w", "t0"))
            note("status", sched.status)
        assert sched.verify() == []
    return worst


def test_commands_do_not_grow_with_the_slots(server: Server) -> None:
    small, large = commands(server, 4, 2), commands(server, 64, 2)
    for name, number in large.items():
        if name != "status":  # which tells the first 16 slots that the trainer waits for, and no more
            assert number <= small[name] + 4, (name, small, large)
    assert large["status"] <= 100
    assert large["complete"] <= 44  # of these about 6 look up what a failure would put back
    assert large["reserve"] <= 40


def test_commands_grow_at_most_with_eta(server: Server) -> None:
    at = {eta: commands(server, 8, eta) for eta in (1, 4, 7)}
    for name in ("complete", "reserve", "refused reserve", "take", "publish"):
        per_step = (at[7][name] - at[1][name]) / 6
        assert per_step <= 6, (name, at)


@pytest.mark.parametrize("group_size", [1, 4])
def test_keys_and_memory_do_not_grow_with_the_steps(server: Server, group_size: int) -> None:
    """After 1,000 steps as after 10, within 5%. The event stream is bounded by configuration: it is full
    once it has ``event_log`` events, so it is compared from there on."""
    marks = (10, 100, 1000)
    with Scheduler(server.url, "long") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, group_size=group_size, event_log=100))
        keys = keys_of(sched.run)
        used: dict[int, dict[str, int]] = {}
        for version in range(marks[-1]):
            while (grant := sched.reserve("w0", version, 16)).reservations:
                sched.complete_many(
                    [(claim, trajectory(claim.v_traj, tokens=500)) for claim in grant.reservations]
                )
            assert sched.take("t0") is not None
            sched.publish(version + 1, f"w/{version + 1:08d}", "t0")
            sched.renew("w0", version + 1, {"inflight": 3})
            if version % 5 == 4:
                sched.checkpointed(version + 1, "t0")
                sched.retire_weights("t0", keep=2)
            if version + 1 in marks:
                assert sched.verify() == []
                used[version + 1] = {
                    name: server.redis.memory_usage(key, samples=0) or 0 for name, key in keys.items()
                }
    early, full, late = (used[mark] for mark in marks)
    assert {name for name in late if late[name]} == {name for name in early if early[name]}
    assert late["events"] <= full["events"] * 1.5  # trimmed by whole nodes
    bounded = [name for name in keys if name != "events"]
    assert sum(late[name] for name in bounded) <= 1.05 * sum(early[name] for name in bounded)
