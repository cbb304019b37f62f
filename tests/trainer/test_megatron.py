"""Megatron against Hugging Face: logits, gradients, weights, one optimizer step, at every split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import MODEL_TYPES, TEMPERATURE, make_batch, run_ranks

from roq.config import Training

pytestmark = pytest.mark.slow

KINDS = [f"{model_type}-{kind}" for model_type in MODEL_TYPES for kind in ("tied", "untied")]
SPLITS = {"single": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 2)}
RANKS = str(Path(__file__).with_name("ranks.py"))


@pytest.fixture(scope="module")
def outputs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The results of every split of the model over ranks."""
    root = tmp_path_factory.mktemp("outputs")
    for name, split in SPLITS.items():
        tp, pp, dp = map(str, split)
        ranks = split[0] * split[1] * split[2]
        done = run_ranks(ranks, RANKS, "parts", tp, pp, dp, str(models), str(root / name))
        assert done.returncode == 0, done.stderr[-4000:]
    return {name: root / name for name in SPLITS}


@pytest.fixture(scope="module")
def reference(models: Path) -> dict[str, dict[str, object]]:
    """Logits, gradients and sums from Hugging Face's model and independently written formulas."""
    from transformers import AutoModelForCausalLM

    out: dict[str, dict[str, object]] = {}
    training = Training()
    batch, payloads = make_batch(version=3, seed=1, groups=3)
    for kind in KINDS:
        model = AutoModelForCausalLM.from_pretrained(models / kind, attn_implementation="eager")
        tokens = torch.arange(24).reshape(2, 12) * 7 % model.config.vocab_size
        with torch.no_grad():
            logits = model(tokens).logits
        total, count, k3 = torch.zeros(()), 0, 0.0
        for members in payloads:
            rewards = torch.tensor([t.reward for t in members])
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for t, a in zip(members, advantage, strict=True):
                ids = torch.tensor([[*t.prompt, *t.tokens]])
                logp = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, dim=-1)
                mine = logp[len(t.prompt) - 1 : -1].gather(1, ids[0, len(t.prompt) :, None])[:, 0]
                engine = torch.tensor(t.logprobs)
                weight = (mine - engine).exp().clamp(max=training.importance_cap).detach()
                ratio = (mine - mine.detach()).exp()
                total = total - (weight * torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a)).sum()
                gap = (mine - engine).detach().double()
                k3 += float((gap.exp() - 1 - gap).sum())
                count += len(t)
        (total / count).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values()))
        out[kind] = {"logits": logits, "grads": grads, "loss": total.item(), "count": count, "k3": k3}
        out[kind]["norm"] = float(norm)
    assert batch.version == 3
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_logits_equal_hugging_faces(outputs, reference, split: str, kind: str) -> None:
    logits = load_file(outputs[split] / kind / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, reference[kind]["logits"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_grpo_gradients_equal_hugging_faces(outputs, reference, split: str, kind: str) -> None:
    found = load_file(outputs[split] / kind / "grads" / "model.safetensors")
    wanted = reference[kind]["grads"]
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    result = torch.load(outputs[split] / kind / "result.pt")
    sums = result["sums"]
    assert sums["loss"] == pytest.approx(reference[kind]["loss"], rel=1e-5)
    assert sums["clipped"] == 0  # one update per batch: the ratio is exactly 1
    assert result["norm"] == pytest.approx(reference[kind]["norm"], rel=1e-5)
    assert sums["tokens"] == reference[kind]["count"]
    assert sums["k3"] == pytest.approx(reference[kind]["k3"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_round_trip_is_exact(outputs, models: Path, split: str, kind: str) -> None:
    found, wanted = outputs[split] / kind / "same", models / kind
    weights, expected = (load_file(folder / "model.safetensors") for folder in (found, wanted))
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    config = json.loads((found / "config.json").read_text())
    assert config == json.loads((wanted / "config.json").read_text())
    assert (found / "tokenizer_config.json").is_file()
    assert not list(found.parent.glob(".tmp-*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [name for name in SPLITS if name != "single"])
def test_every_split_takes_the_same_step(outputs, split: str, kind: str) -> None:
    one = load_file(outputs["single"] / kind / "updated" / "model.safetensors")
    other = load_file(outputs[split] / kind / "updated" / "model.safetensors")
    before = load_file(outputs["single"] / kind / "same" / "model.safetensors")
    grads = load_file(outputs["single"] / kind / "grads" / "model.safetensors")
    for name in one:
        assert not torch.equal(one[name], before[name])
        # Adam's first step is lr * sign(gradient), lr = 1e-3, but only where the gradient is well above
        # its epsilon of 1e-8 and above rounding.
        clear = grads[name].abs() > 1e-5
        assert (one[name] - other[name])[clear].abs().max() < 2e-5, name


@pytest.mark.parametrize("split", ["single", "tp2"])
def test_restored_training_equals_training_that_never_stopped(
    models: Path, tmp_path: Path, split: str
) -> None:
    tp, pp, dp = SPLITS[split]
    done = run_ranks(tp * pp * dp, RANKS, "checkpoint", str(tp), str(pp), str(dp), str(models), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    straight = load_file(tmp_path / "qwen3-tied" / "straight" / "model.safetensors")
    resumed = load_file(tmp_path / "qwen3-tied" / "resumed" / "model.safetensors")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    kept = sorted(path.name for path in (tmp_path / "qwen3-tied" / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003"]
