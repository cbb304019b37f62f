"""The engine: real vLLM on a tiny model; log-probs are compared with Hugging Face's forward pass."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roq.config import Rollout
from roq.errors import ConfigError, StoreFailed, WeightsError
from roq.trajectory import Response
from roq.weights import ObjectStore
from roq_worker.engine import Engine
from tests.workers.engine_support import (
    PROMPT,
    Models,
    Within,
    collect,
    largest_difference,
    reference,
    swap_midway,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def engine(models: Models, run: Within, close: Callable[[Engine], None]) -> Iterator[Engine]:
    # Small steps: after a swap, not all that is in flight fits into one.
    small = {"max_num_batched_tokens": 400}
    settings = Rollout(max_tokens=300, max_concurrency=16, temperature=0.8, engine=small)
    engine = run(Engine.start(str(models(seed=0)), 0, settings, dtype="float32", max_prompt_tokens=64))
    yield engine
    close(engine)


@pytest.fixture(autouse=True)
def at_version_0(request: pytest.FixtureRequest, models: Models, run: Within) -> None:
    """Every test starts with the weights of seed 0; the version only rises."""
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        run(engine.swap(str(models(seed=0)), engine.version + 1))


def test_logprobs_equal_hugging_face(engine: Engine, models: Models, run: Within) -> None:
    draft = run(collect(engine, PROMPT, seed=1))
    expected = reference(models(seed=0), PROMPT, draft.tokens)
    assert largest_difference(draft.logprobs, expected) < 1e-4
    assert draft.segments == [(engine.version, len(draft.tokens))]


def test_seeds_decide_whatever_runs_beside(engine: Engine, run: Within) -> None:
    async def beside() -> list[Response]:
        return await asyncio.gather(*(collect(engine, PROMPT, seed) for seed in (5, 6, 7, 5)))

    alone = run(collect(engine, PROMPT, seed=5))
    together = run(beside())
    assert together[0].tokens == alone.tokens == together[3].tokens
    assert largest_difference(together[0].logprobs, alone.logprobs) < 1e-4
    assert together[1].tokens != alone.tokens


def test_swap_under_requests_in_flight(engine: Engine, models: Models, run: Within) -> None:
    old, new = models(seed=0), models(seed=1)
    before, after = engine.version, engine.version + 5
    drafts, _ = run(swap_midway(engine, new, after, count=12, after=40))
    assert engine.version == after
    crossed = [draft for draft in drafts if len(draft.segments) == 2]
    assert len(crossed) >= 3, "most were in flight"
    for draft in crossed:
        (first, n), (second, m) = draft.segments
        assert (first, second, n + m) == (before, after, len(draft.tokens))
        # Old tokens have the old model's log-probs; later ones the new model's over the whole context,
        # because the KV cache was recomputed.
        old_logprobs = reference(old, PROMPT, draft.tokens)
        new_logprobs = reference(new, PROMPT, draft.tokens)
        assert largest_difference(draft.logprobs[:n], old_logprobs[:n]) < 1e-4
        assert largest_difference(draft.logprobs[n:], new_logprobs[n:]) < 1e-4
        assert largest_difference(old_logprobs[n:], new_logprobs[n:]) > 0.1, "the weights do differ"
    # The same prompt again: nothing of the old weights is left in the prefix cache.
    fresh = run(collect(engine, PROMPT, seed=1))
    assert largest_difference(fresh.logprobs, reference(new, PROMPT, fresh.tokens)) < 1e-4


def test_weights_from_an_object_store(
    engine: Engine, models: Models, run: Within, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROQ_CACHE", str(tmp_path / "cache"))
    store = ObjectStore(f"file://{tmp_path}/objects", tmp_path / "exported")
    location = store.new(7)
    shutil.copytree(models(seed=1), store.folder(location))
    store.put(location)
    version = engine.version
    missing = store.new(8)
    with pytest.raises(StoreFailed, match=missing.rpartition("/")[2]):
        run(engine.swap(missing, version + 1))
    assert engine.version == version
    run(engine.swap(location, version + 1))
    draft = run(collect(engine, PROMPT, seed=4))
    expected = reference(models(seed=1), PROMPT, draft.tokens)
    assert largest_difference(draft.logprobs, expected) < 1e-4


def test_weights_that_do_not_fit_are_refused_before_the_first_write(
    engine: Engine, models: Models, run: Within, tmp_path: Path
) -> None:
    version = engine.version
    before = run(collect(engine, PROMPT, seed=9))

    async def refused(folder: Path, message: str) -> None:
        generating = asyncio.create_task(collect(engine, PROMPT, seed=9))
        await asyncio.sleep(0.05)
        with pytest.raises(WeightsError, match=message):
            await engine.swap(str(folder), version + 1)
        assert (await generating).tokens == before.tokens

    wide = models(seed=0, intermediate_size=96)
    run(refused(wide, r"down_proj\.weight is 64x96 instead of 64x128.* \(and 3 more\)"))
    run(refused(models(seed=0, num_hidden_layers=1), r"model\.layers\.1\.\S+ is absent instead of"))
    run(refused(tmp_path / "none", "no such folder"))
    (tmp_path / "empty").mkdir()
    run(refused(tmp_path / "empty", "no weights"))
    cut = tmp_path / "cut"
    shutil.copytree(models(seed=1), cut)
    os.truncate(cut / "model.safetensors", 20_000)
    run(refused(cut, "20000 bytes long"))

    assert engine.version == version
    assert not engine.failure
    assert run(collect(engine, PROMPT, seed=9)).tokens == before.tokens


def test_going_on_from_a_prefix(engine: Engine, models: Models, run: Within) -> None:
    async def interrupted(tokens: int) -> Response:
        draft = Response()
        stream = engine.generate(PROMPT, max_tokens=200, seed=104)
        async for delta in stream:
            draft.extend(delta.response)
            if len(draft.tokens) >= tokens:
                break
        await stream.aclose()  # aborts it in the engine
        return draft

    first = run(interrupted(30))
    assert engine.inflight == 0
    whole = run(collect(engine, [*PROMPT, *first.tokens], seed=3))
    tokens = first.tokens + whole.tokens
    expected = reference(models(seed=0), PROMPT, tokens)
    assert largest_difference(first.logprobs + whole.logprobs, expected) < 1e-4
    whole_draft = Response()
    whole_draft.extend(first)
    whole_draft.extend(whole)
    assert whole_draft.segments == [(engine.version, len(tokens))]


def test_cancelling_a_task_aborts_its_request(engine: Engine, run: Within) -> None:
    async def cancelled() -> None:
        tasks = [asyncio.create_task(collect(engine, PROMPT, seed, 300)) for seed in range(4)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(cancelled())
    assert engine.inflight == 0
    assert engine._llm.get_num_unfinished_requests() == 0


def test_a_response_that_cannot_go_on(engine: Engine) -> None:
    assert engine.finished([]) is None
    assert engine.finished([5, 6]) is None
    assert engine.finished([5, 1]) == "stop"
    assert engine.finished([5] * 300) == "length"
    assert engine.decode([3, 4, 1]) == "12"


def test_tied_embeddings_and_kept_kv(models: Models, run: Within, close: Callable[[Engine], None]) -> None:
    """A separate engine: tied embeddings, whose output layer must be updated too, and kv_on_swap = "keep"."""
    settings = Rollout(max_tokens=300, max_concurrency=8, temperature=0.8, kv_on_swap="keep", stop=["9"])
    old, new = models(seed=0, tied=True), models(seed=1, tied=True)
    engine: Engine = run(Engine.start(str(old), 0, settings, dtype="float32", max_prompt_tokens=64))
    try:
        drafts, _ = run(swap_midway(engine, new, 1, count=8, after=10))
        assert any(len(draft.segments) == 2 for draft in drafts)
        # A new request after it must not reuse the kept cache of the same prompt.
        fresh = run(collect(engine, PROMPT, seed=1))
        assert fresh.segments == [(1, len(fresh.tokens))]
        assert largest_difference(fresh.logprobs, reference(new, PROMPT, fresh.tokens)) < 1e-4
        # A stop string ends the response and is part of it.
        texts = [engine.decode(draft.tokens) for draft in drafts if len(draft.tokens) < 400]
        assert any(text.endswith("9") for text in texts)
        assert all("9" not in text[:-1] for text in texts)
    finally:
        close(engine)


def test_models_that_cannot_start(models: Models, run: Within, tmp_path: Path) -> None:
    def start(location: str, **changes: Any) -> Any:
        settings = Rollout(**({"max_tokens": 64} | changes))
        return run(Engine.start(location, 0, settings, dtype="float32", max_prompt_tokens=64))

    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none"))):
        start(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"\b48\b.*32, 64"):
        start(str(models(seed=0, head_dim=48)))
    with pytest.raises(ConfigError, match=r"\b564\b.*\b512\b"):
        start(str(models(seed=0)), max_tokens=500)
    with pytest.raises(ConfigError, match=r"\[rollout\.engine\].*no_such_argument"):
        start(str(models(seed=0)), engine={"no_such_argument": 1})
    bare = tmp_path / "bare"
    shutil.copytree(models(seed=0), bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        start(str(bare))
    (bare / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"weights|safetensors"):
        start(str(bare))


def test_starts_that_cannot_work(models: Models, run: Within) -> None:
    def refused(location: str, version: int, message: str, **engine: object) -> None:
        settings = Rollout(max_tokens=8, max_concurrency=1, engine=engine)
        with pytest.raises(ConfigError, match=message):
            run(Engine.start(location, version, settings, dtype="float32", max_prompt_tokens=8))

    refused("/nowhere/v00000003-0a1b2c3d", 3, "weights of version 3 are not on this host; mount that folder")
    refused("/nowhere/model", 0, "model.path = '/nowhere/model': there is no such folder")
    refused(str(models(seed=0)), 0, "data_parallel_size", data_parallel_size=2)
