"""The loss: GRPO with DAPO's token-level mean and a truncated importance weight.

Components:

- advantages relative to the group: DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1. Without
  ``normalize_advantage`` there is no division by the standard deviation: Dr. GRPO, arXiv 2503.20783.
- PPO's clipped ratio with a separate upper bound ("clip-higher"), and the mean over all tokens of the batch
  instead of the mean of the responses' means: DAPO, arXiv 2503.14476, sections 3.1 and 3.3.
- an importance weight per token between the engine that sampled and the trainer that learns, truncated from
  above: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025;
  flash-rl). It also corrects for tokens that were sampled with older weights.

Not included:

- GRPO's KL penalty to a reference model (as in DAPO and Dr. GRPO), so there is no reference model.
- several updates per batch. With one, the ratio is 1 when the gradient is computed and never clipped.
- DAPO's overlong reward shaping, which a reward function can do. Dynamic sampling is done by the scheduler:
  groups whose rewards are all equal can be filtered before they reach the trainer.
- GSPO's and CISPO's treatment of the ratio; a value function; an entropy bonus.

The metric ``k3``, a low-variance estimator of the KL divergence, is from Schulman, "Approximating KL
Divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from roq.types import Batch
from roq_trainer.sums import Sums

__all__ = ["advantages", "batch_advantages", "grpo_loss", "mismatch", "token_logprobs"]

_MAX_LOG_RATIO = 20.0  # avoids an infinite ratio for a broken token


def advantages(rewards: Sequence[Sequence[float]], normalize: bool) -> list[list[float]]:
    """Each trajectory's reward relative to its group: reward minus the group's mean.

    With ``normalize`` it is divided by the group's (sample) standard deviation plus 1e-6, as
    :func:`roq.postprocess.grpo` does. If every group has one trajectory, the whole batch is the group
    (REINFORCE with the batch's mean as its baseline; REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: one list per group, one reward per member.
    """
    if all(len(group) == 1 for group in rewards):
        flat = _relative([group[0] for group in rewards], normalize)
        return [[value] for value in flat]
    return [_relative(group, normalize) for group in rewards]


def batch_advantages(batch: Batch, normalize: bool) -> list[list[float]]:
    """The advantages of a batch: from post-processing if given, otherwise from the rewards."""
    computed = advantages([[m.reward for m in group.members] for group in batch.groups], normalize)
    return [
        [own if m.advantage is None else m.advantage for m, own in zip(group.members, ours, strict=True)]
        for group, ours in zip(batch.groups, computed, strict=True)
    ]


def _relative(rewards: Sequence[float], normalize: bool) -> list[float]:
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if normalize and len(rewards) > 1:
        centred = centred / (values.std() + 1e-6)
    return centred.tolist()


def token_logprobs(
    logits: torch.Tensor, select: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probability of each response token under the trainer, in nats, after temperature.

    The engine reports its log-probs after temperature, so the trainer's logits are divided by it too.

    Args:
        logits: [b, s, vocab / TP], this tensor-parallel rank's part of the vocabulary.
        select: int64 [N], positions in the flattened [b * s] whose logits predict a response token.
        targets: int64 [N], those tokens.

    Returns:
        float32 [N], the same on every tensor-parallel rank.
    """
    # Select first: the copy, which the cross entropy overwrites, then covers only the responses.
    chosen = logits.flatten(0, 1)[select].float() / temperature
    return -vocab_parallel_cross_entropy(chosen, targets)


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    engine_logp: torch.Tensor,
    advantage: torch.Tensor,
    valid: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum (not the mean) of the tokens' losses, and the number of tokens whose ratio was clipped.

    Per token, with ``r = exp(logp - old_logp)`` and ``w = min(exp(old_logp - engine_logp), cap)``::

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    ``w`` has no gradient: it corrects the expectation from the engine's distribution to the trainer's.
    The caller divides by the token count of the whole batch, over all micro batches and data-parallel
    ranks, so the result does not depend on the split.

    Args:
        logp: float32 [N], under the weights being updated; the only one with a gradient.
        old_logp: float32 [N], under the trainer's weights before the update.
        engine_logp: float32 [N], as reported by the engine that sampled.
        advantage: float32 [N]. valid: float32 [N], 1 for a real token, 0 for padding.
    """
    ratio = torch.exp((logp - old_logp).clamp(max=_MAX_LOG_RATIO))
    free = ratio * advantage
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    weight = importance_weight(old_logp, engine_logp).clamp(max=importance_cap)
    loss = -(weight * torch.minimum(free, held) * valid).sum()
    return loss, ((held < free) * valid).sum()


def importance_weight(old_logp: torch.Tensor, engine_logp: torch.Tensor) -> torch.Tensor:
    """The untruncated weight ``exp(old_logp - engine_logp)`` per token."""
    return torch.exp((old_logp - engine_logp).clamp(max=_MAX_LOG_RATIO))


def mismatch(
    old_logp: torch.Tensor,
    engine_logp: torch.Tensor,
    current: torch.Tensor,
    valid: torch.Tensor,
    importance_cap: float,
) -> Sums:
    """The mismatch between engine and trainer, as float64 sums over tokens.

    ``k3 = r - 1 - log r`` with ``log r = old_logp - engine_logp`` estimates KL(engine || trainer).
    ``outliers`` counts ``|log r| > 1``; ``abs_diff`` sums ``|log r|`` over the tokens that were sampled
    with the trainer's weights (``current`` is 1), where only numerics may differ.
    """
    log_ratio = (old_logp - engine_logp).double()
    valid, current = valid.double(), (current * valid).double()
    ratio = importance_weight(old_logp.double(), engine_logp.double())
    return Sums(
        tokens=valid.sum(),
        k3=((ratio - 1.0 - log_ratio) * valid).sum(),
        outliers=((log_ratio.abs() > 1.0) * valid).sum(),
        abs_diff=(log_ratio.abs() * current).sum(),
        abs_diff_tokens=current.sum(),
        importance=(ratio.clamp(max=importance_cap) * valid).sum(),
        truncated=((ratio > importance_cap) * valid).sum(),
    )
