"""The example in the client's docstring, and calls on a run that does not exist."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import roq
from roq import RunConfig, Scheduler, UnknownRun
from tests.conftest import Server


def test_the_example_of_the_scheduler_runs(server: Server) -> None:
    (block,) = [part for part in inspect.cleandoc(Scheduler.__doc__ or "").split("\n\n") if part[:2] == "  "]
    code = textwrap.dedent(block).replace("redis://localhost", server.url)
    assert server.url in code
    names: dict[str, Any] = {name: getattr(roq, name) for name in roq.__all__}
    exec(code, names)
    with names["sched"] as sched:
        status = sched.status()
    assert (status.version, status.ledger.trained) == (1, 2)


@pytest.mark.parametrize(
    "call",
    [
        Scheduler.audit,
        Scheduler.slots,
        Scheduler.weights,
        Scheduler.events,
        Scheduler.status,
        Scheduler.dead,
        lambda sched: sched.newest_event(None),
        lambda sched: sched.events(wait_s=0.05),
        lambda sched: sched.wait(0, 0.05),
        lambda sched: sched.wait(0, 0.05, batch=True),
    ],
)
def test_reading_an_unknown_run(sched: Scheduler, call: Callable[[Scheduler], Any]) -> None:
    with pytest.raises(UnknownRun):
        call(sched)


def test_reading_a_run_that_holds_nothing(sched: Scheduler) -> None:
    sched.create(RunConfig(eta=1, batch_size=1))
    assert sched.weights() == []
    assert sched.slots() == []
    assert sched.wait(0, 0.05) >= 0
    assert sched.audit().problems == []
