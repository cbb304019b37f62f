"""Names and texts that cannot be are refused, and texts have a limit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from roq import AsyncScheduler, ConfigError, Invalid, RunConfig, Scheduler
from roq.processes import unique_name

CONFIG = RunConfig(eta=1, batch_size=2, prompts=8)


@pytest.mark.parametrize(
    "name", ["", "a b", "a:b", "{a}", "a}b", "a*", "a\0", "a\n", "é", "-a", "a" * 65, "\ud800"]
)
def test_names_of_runs(name: str) -> None:
    for kind in (Scheduler, AsyncScheduler):
        with pytest.raises(ConfigError, match="run = "):
            kind("redis://h", name)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\0", "a\n", "é", "-a", "a" * 129, "\ud800"])
def test_names_of_workers_and_trainers(sched: Scheduler, name: str) -> None:
    sched.create(CONFIG, weights="w")
    calls: list[Callable[[], object]] = [
        lambda: sched.reserve(name, 0, 1),
        lambda: sched.renew(name),
        lambda: sched.pin(name),
        lambda: sched.leave(name),
        lambda: sched.take(name),
        lambda: sched.publish(1, "w", name),
        lambda: sched.announce_sender("h:1/s", name),
        lambda: sched.checkpointed(0, name),
        lambda: sched.retire_weights(name, 1),
    ]
    for call in calls:
        with pytest.raises(Invalid):
            call()
    assert sched.status().workers == []


@pytest.mark.parametrize("prefix", ["a b", "a:", "é", "-", "\0", "a" * 33])
def test_prefixes_of_names(prefix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(prefix))):
        unique_name(prefix)


def test_odd_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("", "my host!", "ü", "h" * 300, "..."):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        name = unique_name("gpu-")
        assert len(name) <= 128
        assert name.startswith("gpu-")
        assert name.replace("-", "").replace(".", "").isascii()


def test_sizes_are_limited(sched: Scheduler) -> None:
    sched.create(CONFIG, weights="w")
    big = "x" * 20_000
    for info in ({"say": big}, {"say": object()}, {"say": {1, 2}}):
        with pytest.raises(Invalid, match="info"):
            sched.renew("w0", 0, info)
    with pytest.raises(Invalid, match="metrics"):
        sched.publish(1, "w", "t0", {str(i): 0.5 for i in range(1000)})
    for weights_at in (big, "a\0b", "\ud800"):
        with pytest.raises(Invalid):
            sched.publish(1, weights_at, "t0")
    with pytest.raises(Invalid, match="settings"):
        Scheduler(sched.url, "other").create(CONFIG, settings={"a.b": "x" * (2 << 20)})
    (claim,) = sched.reserve("w0", 0, 1).reservations
    sched.fail(claim, "\ud800" + big * 100)
    worker = sched.status().workers[0]
    assert worker.error is not None
    assert len(worker.error) <= 2000
    assert sched.verify() == []
