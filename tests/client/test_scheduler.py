"""The example in the docstring of the client runs as it stands."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import roq
from roq import Scheduler
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
