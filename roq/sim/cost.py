"""Cost models: seconds for decoding, prefill, training and weight transfer.

A decode step of an instance with ``n`` running requests and ``C`` tokens of context in total takes

    ``t(n, C) = max(threshold, base + per_request * n) + attention_base + attention_per_token * C``

seconds: the first part reads the weights or multiplies by them, whichever is slower, the second reads the
KV cache. While ``n`` stays the same ``C`` grows by ``n`` a step, so ``m`` steps take
``m * (t(n, C) - a * n / 2) + a * n / 2 * m**2`` with ``a = attention_per_token``. For real ``m`` this is the
same however a span is cut into parts, and it has a closed inverse: a run costs events, not tokens.
"""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from roq.errors import ConfigError

__all__ = ["CostModel", "RolloutCost", "TrainerCost", "load_cost", "shipped_costs"]

Cost = Annotated[float, Meta(ge=0, le=1e9)]


class RolloutCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout instance. Times are seconds.

    Attributes:
        threshold_s, base_s, per_request_s, attention_base_s, attention_per_token_s: the decode step, above.
        kv_tokens: tokens of context that its KV cache holds.
        prefill_per_token_s, prefill_per_token2_s: computing the KV of ``p`` tokens takes the first times
            ``p`` plus the second times ``p**2``; decoding pauses during it.
        admit_s: further pause of decoding for each admitted request, besides prefill.
        latency_s: from a response's last token until it is completed (its reward); it still uses capacity.
        load_s: how long an instance pauses to load published weights.
        contention: share of its speed that it loses while the trainer trains on the same machine.
        gpus: GPUs of one instance.
    """

    threshold_s: Cost = 0.0
    base_s: Cost = 0.0
    per_request_s: Cost = 0.0
    attention_base_s: Cost = 0.0
    attention_per_token_s: Cost = 0.0
    kv_tokens: Annotated[int, Meta(ge=1)]
    prefill_per_token_s: Cost = 0.0
    prefill_per_token2_s: Cost = 0.0
    admit_s: Cost = 0.0
    latency_s: Cost = 0.0
    load_s: Cost = 0.0
    contention: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    gpus: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if max(self.threshold_s, self.base_s, self.per_request_s) + self.attention_base_s <= 0:
            raise ValueError(
                "a decode step takes no time; give threshold_s, base_s, per_request_s or attention_base_s"
            )

    def step_s(self, running: int, context: float) -> float:
        """Seconds of one decode step with so many requests and tokens of context."""
        return (
            max(self.threshold_s, self.base_s + self.per_request_s * running)
            + self.attention_base_s
            + self.attention_per_token_s * context
        )

    def decode_s(self, steps: float, running: int, context: float) -> float:
        """Seconds of ``steps`` decode steps (a real number) that begin with ``context`` tokens."""
        slope = self.attention_per_token_s * running / 2
        return steps * (self.step_s(running, context) - slope) + slope * steps * steps

    def steps_in(self, seconds: float, running: int, context: float) -> float:
        """Decode steps (a real number) in some seconds: the inverse of :meth:`decode_s`."""
        slope = self.attention_per_token_s * running / 2
        first = self.step_s(running, context) - slope
        return 2 * seconds / (first + math.sqrt(first * first + 4 * slope * seconds))

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute the KV cache of so many tokens of one request."""
        return tokens * (self.prefill_per_token_s + self.prefill_per_token2_s * tokens)


class TrainerCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training process: affine in a batch's tokens. Times are seconds.

    Attributes:
        fixed_s: of every step.
        gpu_s_per_token: GPU-seconds for a token, prompt tokens included; divided by the trainer's GPUs.
        sync_s: sending the weights to the instances, which are paused; the version counts after it.
        turnaround_s: from publishing until the trainer can take another batch (checkpoint, bookkeeping).
    """

    fixed_s: Cost = 0.0
    gpu_s_per_token: Cost = 0.0
    sync_s: Cost = 0.0
    turnaround_s: Cost = 0.0

    def train_s(self, tokens: float, gpus: int) -> float:
        """Seconds to train on so many tokens with so many GPUs."""
        return self.fixed_s + self.gpu_s_per_token * tokens / gpus


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on its hardware; one TOML file each."""

    name: str
    rollout: RolloutCost
    trainer: TrainerCost


def shipped_costs() -> list[str]:
    """Names of the cost models that come with roq."""
    folder = importlib.resources.files("roq.sim") / "costs"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_cost(name: str) -> CostModel:
    """A cost model by the name of a shipped one, or the path of a TOML file.

    Raises:
        ConfigError: there is no such model, or its file is invalid.
    """
    if name in shipped_costs():
        text = (importlib.resources.files("roq.sim") / "costs" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{name} is not a cost model: use {', '.join(shipped_costs())}, or a TOML file ({error})"
            ) from None
    try:
        return msgspec.convert(tomllib.loads(text), CostModel)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name}: {error}") from None
