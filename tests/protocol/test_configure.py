"""What may change between two starts of a run, and what may not."""

from __future__ import annotations

import getpass
import socket

import pytest

from roq import RunConfig, Scheduler
from roq.errors import ConfigMismatch
from tests.protocol.play import events_of, trajectory


def test_a_change_is_an_event_with_who_and_what(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, total_steps=4), settings={"trainer.lr": "0.1"})
    changes = {"trainer.lr": "0.01", "max_inflight": "7", "total_steps": "5", "trainer.new": "1"}
    assert sched.configure(changes) == 4
    assert sched.settings() == {"trainer.lr": "0.01", "trainer.new": "1"}
    assert (sched.config().max_inflight, sched.config().total_steps) == (7, 5)
    assert sched.configure(changes) == 0
    (event,) = [event for _, event in events_of(sched) if event["event"] == "configured"]
    assert event["by"] == f"{getpass.getuser()}@{socket.gethostname()}"
    assert event["changes"] == (
        "max_inflight: unset -> 7; total_steps: 4 -> 5; trainer.lr: 0.1 -> 0.01; trainer.new: unset -> 1"
    )
    assert sched.configure({"max_inflight": "", "trainer.new": ""}) == 2
    assert sched.config().max_inflight is None
    assert sched.settings() == {"trainer.lr": "0.01"}
    assert sched.verify() == []
    assert sched.audit().problems == []


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": "3"},
        {"eta": ""},
        {"lease_ms": "1"},
        {"prompts": "9"},
        {"unheard_of": "1"},
        {"total_steps": "3"},
        {"epochs": "1"},
        {"max_inflight": "0"},
        {"max_inflight": "-1"},
        {"max_inflight": "many"},
        {"event_log": ""},
    ],
)
def test_what_cannot_be_changed(sched: Scheduler, changes: dict[str, str]) -> None:
    """Nor is anything else in the same call."""
    sched.create(
        RunConfig(eta=1, batch_size=2, total_steps=4, epochs=2, prompts=8), settings={"trainer.lr": "0.1"}
    )
    before = sched.config()
    with pytest.raises(ConfigMismatch, match=next(iter(changes))):
        sched.configure({"trainer.lr": "0.01", **changes})
    assert sched.config() == before
    assert sched.settings() == {"trainer.lr": "0.1"}


def step(sched: Scheduler, version: int) -> None:
    (claim,) = sched.reserve("w0", version, 1).reservations
    sched.complete(claim, trajectory(version))
    assert sched.take("t0") is not None
    sched.publish(version + 1, f"w/{version + 1}", "t0")


@pytest.mark.parametrize(
    ("change", "continues"),
    [({"total_steps": "2"}, False), ({"total_steps": "2", "epochs": "2"}, True), ({"epochs": "2"}, False)],
)
def test_a_run_that_ended_continues_with_more(
    sched: Scheduler, change: dict[str, str], continues: bool
) -> None:
    """One prompt, one epoch, one step: it needs more of both."""
    sched.create(RunConfig(eta=0, batch_size=1, prompts=1, total_steps=1))
    step(sched, 0)
    assert sched.status().end_reason == "total_steps"
    sched.configure(change)
    assert sched.status().ended != continues
    if continues:
        step(sched, 1)
        assert sched.status().end_reason == "total_steps"
    assert sched.verify() == []
    assert sched.audit().problems == []


def test_a_run_whose_prompts_were_used_up_continues_with_more_epochs(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=0, batch_size=2, prompts=3))
    for claim in sched.reserve("w0", 0, 2).reservations:
        sched.complete(claim, trajectory(0))
    assert sched.take("t0") is not None
    sched.publish(1, "w/1", "t0")
    (claim,) = sched.reserve("w0", 1, 2).reservations
    sched.complete(claim, trajectory(1))
    assert sched.take("t0") is None
    assert sched.status().end_reason == "prompts_exhausted"
    sched.configure({"epochs": "2"})
    (claim,) = sched.reserve("w0", 1, 1).reservations
    sched.complete(claim, trajectory(1))
    assert sched.take("t0") is not None, "the one that was left over is in it"
    assert sched.verify() == []
