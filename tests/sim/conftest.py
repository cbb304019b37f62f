"""Scenarios small enough to work out by hand, and a server for roq's own policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from roq.sim.cost import CostModel, RolloutCost, TrainerCost
from roq.sim.runs import scratch_server
from roq.sim.scenario import Scenario
from roq.sim.workload import Lengths, Workload


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with scratch_server() as server:
        yield server


def flat(train_s: float = 3.0, **rollout: float) -> CostModel:
    """A token takes a second whatever runs beside it, an update ``train_s``."""
    costs = {"base_s": 1.0, "kv_tokens": 10_000} | rollout
    return CostModel(
        name="flat",
        rollout=RolloutCost(**costs),
        trainer=TrainerCost(fixed_s=train_s),  # type: ignore[arg-type]
    )


def groups(*lengths: int | Sequence[int]) -> Workload:
    """A workload of groups with these response lengths; prompts of one token."""
    rows = [Lengths(1, (row,) if isinstance(row, int) else tuple(row)) for row in lengths]
    return Workload(rows, "by hand")


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """Batches of two single trajectories, four places on one instance, unless told otherwise."""

    def make(**changes: object) -> Scenario:
        values: dict[str, object] = {
            "cost": flat(), "batch_size": 2, "group_size": 1, "instances": 1, "places": 4,
            "trainer_gpus": 1, "reprefill": False, "batches": 3,
        }  # fmt: skip
        return Scenario(**(values | changes))  # type: ignore[arg-type]

    return make
