"""Weights that the trainer sends: real vLLM and the real sender, over gloo."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roq.config import Rollout
from roq.errors import EngineError, WeightsError
from roq_worker.engine import Engine
from tests.workers.engine_support import PROMPT, collect, largest_difference, reference, swap_midway
from tests.workers.sender_support import Process, breaking_sender, holds

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

Models = Callable[..., Path]
Within = Callable[[Any], Any]


def nowhere(version: int) -> str:
    """A location without files, named as on the trainer's host."""
    return f"/nowhere/v{version:08d}"


@pytest.fixture(scope="module")
def start(models: Models, run: Within) -> Callable[[], Engine]:
    def begin() -> Engine:
        settings = Rollout(
            max_tokens=300, max_concurrency=16, temperature=0.8, engine={"max_num_batched_tokens": 400}
        )
        return run(Engine.start(str(models(seed=0)), 0, settings, dtype="float32", max_prompt_tokens=64))

    return begin


@pytest.fixture(scope="module")
def engine(start: Callable[[], Engine], close: Callable[[Engine], None]) -> Iterator[Engine]:
    engine = start()
    yield engine
    close(engine)


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer's exports: even versions are the model of seed 0, odd ones that of seed 1."""
    folder = tmp_path_factory.mktemp("exported")
    for version in range(1, 40):
        (folder / f"v{version:08d}").symlink_to(models(seed=version % 2))
    (folder / f"v{90:08d}").symlink_to(models(seed=0, intermediate_size=96))
    return folder


@pytest.fixture(scope="module")
def sender(folder: Path) -> Iterator[Process]:
    process = Process(folder)
    yield process
    process.end()


def next_version(engine: Engine, seed: int) -> int:
    """The next version with the weights of the model of ``seed``."""
    return engine.version + 1 + (engine.version + 1 + seed) % 2


def holds_seed(engine: Engine, run: Within, models: Models) -> int:
    return next(seed for seed in (0, 1) if holds(engine, run, models(seed=seed)))


def test_weights_are_received_without_any_file(
    engine: Engine, sender: Process, models: Models, run: Within
) -> None:
    for seed in (1, 0, 1):
        version = next_version(engine, seed)
        swapped = run(engine.swap(nowhere(version), version, sender.address))
        assert (swapped.how, swapped.trouble, engine.version) == ("received", "", version)
        assert holds(engine, run, models(seed=seed))


def test_received_under_requests_in_flight(
    engine: Engine, sender: Process, models: Models, run: Within
) -> None:
    version = next_version(engine, 0)
    run(engine.swap(nowhere(version), version, sender.address))
    before, after = engine.version, next_version(engine, 1)
    drafts, swapped = run(
        swap_midway(engine, Path(nowhere(after)), after, count=12, after=40, sender=sender.address)
    )
    assert (swapped.how, swapped.trouble) == ("received", "")
    crossed = [draft for draft in drafts if len(draft.segments) == 2]
    assert len(crossed) >= 3, "most were in flight"
    for draft in crossed:
        (first, n), (second, _) = draft.segments
        assert (first, second) == (before, after)
        for seed, part in ((0, slice(0, n)), (1, slice(n, None))):
            expected = reference(models(seed=seed), PROMPT, draft.tokens)
            assert largest_difference(draft.logprobs[part], expected[part]) < 1e-4


def test_what_cannot_be_received_is_read(
    engine: Engine, sender: Process, models: Models, run: Within, tmp_path: Path, folder: Path
) -> None:
    host = sender.address.rpartition(":")[0]
    (folder / "wide").symlink_to(models(seed=0, intermediate_size=96))
    cases = {
        (f"{host}:1/secret", "any"): "127.0.0.1:1",
        (sender.address + "x", "any"): "wrong secret",
        ("rubbish", "any"): "rubbish",
        (sender.address, "unknown"): "unknown",
        (sender.address, "wide"): "the weights do not fit the running model",
    }
    for (address, name), why in cases.items():
        version = engine.version + 1
        at = tmp_path / str(version) / name
        before = holds_seed(engine, run, models)
        at.parent.mkdir()
        with pytest.raises(WeightsError, match=re.escape(str(at))) as error:
            run(engine.swap(str(at), version, address))
        assert why in str(error.value)
        assert (engine.version, engine.failure) == (version - 1, "")
        assert holds(engine, run, models(seed=before)), "the old weights stay in use"
        at.symlink_to(models(seed=1 - before))
        swapped = run(engine.swap(str(at), version, address))
        assert why in swapped.trouble
        assert (engine.version, swapped.how) == (version, "read")
        assert holds(engine, run, models(seed=1 - before))
    version = next_version(engine, 1)
    assert run(engine.swap(nowhere(version), version, sender.address)).how == "received"
    assert holds(engine, run, models(seed=1))


def test_a_sender_that_died_and_its_successor(
    engine: Engine, models: Models, run: Within, folder: Path
) -> None:
    first = Process(folder)
    version = next_version(engine, 0)
    run(engine.swap(nowhere(version), version, first.address))
    first.end()
    swapped = run(engine.swap(str(models(seed=1)), version + 1, first.address))
    assert "ended the connection" in swapped.trouble
    assert holds(engine, run, models(seed=1))
    second = Process(folder)
    try:
        assert run(engine.swap(nowhere(version + 2), version + 2, second.address)).how == "received"
        assert holds(engine, run, models(seed=0))
    finally:
        second.end()


@pytest.fixture
def breaking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], str]]:
    """A sender that dies after a number of buffers of 4 KiB each."""
    with breaking_sender(folder, monkeypatch) as start:
        yield start


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_a_sender_that_dies_midway_leaves_no_mixture(
    engine: Engine, folder: Path, breaking: Callable[[int], str], models: Models, run: Within, after: int
) -> None:
    run(engine.swap(str(models(seed=0)), next_version(engine, 0)))
    version = next_version(engine, 1)
    address = breaking(after)
    location = f"{folder}/v{version:08d}"

    async def both() -> None:  # a request in flight continues
        going = asyncio.create_task(collect(engine, PROMPT, seed=8, max_tokens=250))
        await asyncio.sleep(0.1)
        swapped = await engine.swap(location, version, address)
        await going
        assert swapped.how == "read"
        assert swapped.trouble

    run(both())
    assert (engine.version, engine.failure) == (version, "")
    assert holds(engine, run, models(seed=1))


def test_half_received_weights_without_files_break_the_engine(
    start: Callable[[], Engine],
    close: Callable[[Engine], None],
    breaking: Callable[[int], str],
    models: Models,
    run: Within,
) -> None:
    engine = start()
    try:
        with pytest.raises(WeightsError, match=nowhere(1)):  # nothing was written yet
            run(engine.swap(nowhere(1), 1, breaking(0)))
        assert engine.failure == ""
        assert holds(engine, run, models(seed=0))
        address = breaking(5)
        with pytest.raises(EngineError, match=nowhere(1)):
            run(engine.swap(nowhere(1), 1, address))
        assert "failed midway" in engine.failure
        assert engine.version == 0
    finally:
        close(engine)


def test_a_frozen_sender_is_waited_for_within_bounds(
    engine: Engine, folder: Path, models: Models, run: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roq_worker import receiver

    frozen = Process(folder)
    try:
        version = next_version(engine, 0)
        run(engine.swap(nowhere(version), version, frozen.address))
        monkeypatch.setattr(receiver, "OFFER_S", 1.0)
        frozen.signal(signal.SIGSTOP)
        swapped = run(engine.swap(str(models(seed=1)), next_version(engine, 1), frozen.address))
        assert swapped.how == "read"
        assert swapped.trouble
        began = time.monotonic()
        swapped = run(engine.swap(str(models(seed=0)), engine.version + 1, frozen.address))
        assert time.monotonic() - began < 0.9, "it is not waited for again"
        assert swapped.how == "read"
        assert swapped.trouble
        run(engine.swap(str(models(seed=1)), engine.version + 1, frozen.address))
        assert holds(engine, run, models(seed=1))
    finally:
        frozen.signal(signal.SIGCONT)
        frozen.end()
