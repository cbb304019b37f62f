"""The example's base model: what the script makes loads everywhere, and the job files fit it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roq.config import load_job
from roq.job.prompts import load_prompts
from roq.rewards import reasoning_gym

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted(EXAMPLES.rglob("*.toml"))
ANY_TEXT = "21 1, 20 1\n\tπ ≠ 3 <answer> 7</answer> 😀  end "


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "make_base_model.py"), "--out", str(out), "--steps", "4", *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "base"
    made = _make(out)
    assert made.returncode == 0, made.stderr
    return out


@pytest.mark.slow
def test_model_and_tokenizer_load(base: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] % 64 == 0
    assert len(tokenizer) <= config["vocab_size"]
    assert not config["tie_word_embeddings"]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert config["eos_token_id"] == tokenizer.eos_token_id is not None
    assert len({tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}) == 3


@pytest.mark.slow
def test_tokenizer_round_trips_any_text(base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    for text in (ANY_TEXT, " 38 6, 32 6<answer> 2</answer>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.slow
def test_same_settings_are_not_made_again(base: Path) -> None:
    before = (base / "model.safetensors").stat().st_mtime_ns
    again = _make(base)
    assert "already made" in again.stdout
    assert (base / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    made = _make(tmp_path)
    assert made.returncode == 1
    assert "other files" in made.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_job_files_load_and_their_prompts_too(path: Path) -> None:
    job = load_job(path)
    assert len(load_prompts(job.data)) >= job.protocol.batch_size


@pytest.mark.slow
def test_the_demo_fits_the_model(base: Path) -> None:
    """Every prompt and every careful answer fits the job's limits, and the scorer calls the answer right."""
    from transformers import AutoTokenizer

    script = _module("make_base_model", EXAMPLES / "make_base_model.py")
    job = load_job(EXAMPLES / "gcd.toml")
    assert job.data.settings == script.TASK
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert job.rollout.max_tokens == script.MAX_NEW_TOKENS
    for item in load_prompts(job.data):
        answer = script.respond(*item["metadata"]["numbers"], "careful", None)
        assert reasoning_gym(item, answer) == 1.0
        assert len(tokenizer(item["prompt"])["input_ids"]) <= job.data.max_prompt_tokens
        assert len(tokenizer(answer)["input_ids"]) < job.rollout.max_tokens


def test_the_reward_function_beside_the_jsonl_prompts() -> None:
    score = _module("reward", EXAMPLES / "jsonl" / "reward.py").score
    row = {"numbers": [6, 2], "answer": 2}
    assert score(row, " 6 2, 4 2, 2 2<answer> 2</answer>") == pytest.approx(1.0)
    assert score(row, "<answer> 2</answer>") == pytest.approx(0.7)
    assert score(row, " 6 2, 4 2, 1 2<answer> 1</answer>") == pytest.approx(0.2)
    assert score(row, " 6 2, 4 2, 2 2") == 0.0
