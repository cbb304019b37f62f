"""A job file that changes between two starts of its run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq import Scheduler
from roq.config import CHANGEABLE, Job, load_job
from roq.errors import ConfigMismatch
from roq.job.stored import create_run, read_job

Create = Callable[..., tuple[Job, list[str]]]


@pytest.fixture
def create(job: Callable[..., Path], url: str) -> Create:
    """Create the run of a job with these changes; returns what is stored then, and what was said."""

    def create(**changes: Any) -> tuple[Job, list[str]]:
        said: list[str] = []
        with Scheduler(url, "demo") as sched:
            create_run(sched, load_job(job(**changes)), say=said.append)
            return read_job(sched), said

    return create


def test_settings_of_one_process_change(create: Create) -> None:
    create()
    changes = {
        "trainer__lr": 1e-3,
        "rollout__workers": 3,
        "protocol__total_steps": 9,
        "reward__timeout_s": 3.5,
    }
    stored, said = create(**changes)
    assert (stored.trainer.lr, stored.rollout.workers) == (1e-3, 3)
    assert (stored.protocol.total_steps, stored.reward.timeout_s) == (9, 3.5)
    (line,) = said
    for key in changes:
        assert key.replace("__", ".") in line
    assert create(**changes)[1] == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"run__seed": 7}, "run.seed"),
        ({"protocol__eta": 2}, "protocol.eta"),
        ({"protocol__lease_s": 9.0}, "protocol.lease_s"),
        ({"data__shuffle": False}, "data.shuffle"),
        ({"rollout__temperature": 0.5}, "rollout.temperature"),
        ({"protocol__total_steps": 2}, "total_steps"),
    ],
)
def test_what_defines_data_and_protocol_does_not(create: Create, changes: dict[str, Any], key: str) -> None:
    before, _ = create()
    with pytest.raises(ConfigMismatch, match=key):
        create(trainer__lr=1e-3, **changes)
    assert create()[0] == before


def test_every_changeable_key_is_one() -> None:
    keys = {
        f"{section.name}.{key}"
        for section in msgspec.structs.fields(Job)
        for key in section.type.__struct_fields__
    }
    assert keys > CHANGEABLE
