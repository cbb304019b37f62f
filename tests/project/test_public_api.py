"""Public is what these packages export, and nothing changes there by accident."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import get_type_hints

import pytest

import roq
from roq import errors

# Add a name here when it becomes public. Every error is public: roq/errors.py is its only home.
PUBLIC = {
    "roq": [
        "AsyncScheduler",
        "Batch",
        "BatchGroup",
        "BatchMember",
        "CallStats",
        "Completion",
        "DeadLetter",
        "Grant",
        "Job",
        "Release",
        "Removal",
        "Renewal",
        "Reservation",
        "Response",
        "RunConfig",
        "Scheduler",
        "SlotStatus",
        "Status",
        "Trajectory",
        "WeightsRef",
        "load_job",
    ],
    "roq.rewards": ["RewardFunction", "exact_match", "load_function", "reasoning_gym"],
    "roq.postprocess": ["Member", "PostProcessor", "Verdict", "grpo", "leave_one_out"],
    "roq.events": [
        "Archive",
        "archived_config",
        "Audit",
        "audit_events",
        "Batch",
        "BEGINNING",
        "Event",
        "follow",
        "GroupHistory",
        "MemberHistory",
        "Move",
        "Place",
        "read_archive",
        "read_events",
        "Replay",
    ],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_exported_names_are_the_agreed_ones(name: str) -> None:
    exported = import_module(name).__all__
    assert len(exported) == len(set(exported))
    assert set(exported) == {*PUBLIC[name], *(errors.__all__ if name == "roq" else ())}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_exported_is_there_and_what_is_there_is_exported(name: str) -> None:
    package = import_module(name)
    ours = {
        public
        for public, item in vars(package).items()
        if not public.startswith("_") and not isinstance(item, ModuleType)
        if getattr(item, "__module__", "").startswith(name)
    }
    assert ours <= set(package.__all__) <= vars(package).keys()


def test_the_clients_calls_return_public_types() -> None:
    calls = [call for _, call in inspect.getmembers(roq.Scheduler, inspect.isfunction)]
    public = {getattr(roq, name) for name in roq.__all__}
    for call in calls:
        returned = get_type_hints(call).get("return")
        if inspect.isclass(returned) and returned.__module__.startswith(("roq.types", "roq.config")):
            assert returned in public, call.__qualname__
