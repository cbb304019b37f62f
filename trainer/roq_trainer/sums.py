"""Sums over the response tokens of a batch, for the metrics of its step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["Sums"]

_ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Sums:
    """Scalar tensors, each a sum over response tokens; sums that a pass does not compute are 0.

    To add a metric, add a field here, its value in :func:`roq_trainer.loss.mismatch` or
    :func:`roq_trainer.step.update`, and its name in :func:`roq_trainer.metrics.step_row`.

    Attributes:
        tokens: 1 for each; the denominator of the means. prompt_tokens: those of the prompts.
        k3: the estimate of KL(engine || trainer), in nats.
        outliers: tokens whose log-prob differs by more than 1 between engine and trainer.
        abs_diff, abs_diff_tokens: that difference, over tokens sampled with the weights being trained.
        importance: the truncated importance weight. truncated: tokens whose weight was truncated.
        loss: the loss. clipped: tokens whose ratio was clipped.
    """

    tokens: torch.Tensor = _ZERO
    prompt_tokens: torch.Tensor = _ZERO
    k3: torch.Tensor = _ZERO
    outliers: torch.Tensor = _ZERO
    abs_diff: torch.Tensor = _ZERO
    abs_diff_tokens: torch.Tensor = _ZERO
    importance: torch.Tensor = _ZERO
    truncated: torch.Tensor = _ZERO
    loss: torch.Tensor = _ZERO
    clipped: torch.Tensor = _ZERO

    def stack(self) -> torch.Tensor:
        """All sums, in the order of the fields: float64 [fields]."""
        return torch.stack([value.double() for value in self._values()])

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))
