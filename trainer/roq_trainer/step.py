"""The two passes over a batch: log-probs under the weights before the update, then the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from roq.config import Training
from roq_trainer.data import MicroBatch
from roq_trainer.loss import grpo_loss, mismatch, token_logprobs
from roq_trainer.sums import Sums

__all__ = ["logprob_pass", "update"]


def _schedule(
    model: DistributedDataParallel, batches: Sequence[MicroBatch], loss: Any, *, forward_only: bool
) -> list[Any]:
    """Run Megatron's pipeline schedule; returns the results of ``loss`` per micro batch (last stage only)."""

    def forward(data: Iterator[MicroBatch], stage: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(data)
        # No mask: attention is causal, and padding is on the right.
        return stage(batch.tokens, batch.positions, None), partial(loss, batch)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=int(batches[0].tokens.shape[1]),  # not used: lengths vary
        micro_batch_size=int(batches[0].tokens.shape[0]),  # not used either
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def logprob_pass(
    model: DistributedDataParallel, batches: Sequence[MicroBatch], temperature: float, importance_cap: float
) -> Sums:
    """Set every micro batch's ``old_logp`` (last stage) and sum the mismatch with the engine.

    Returns:
        This rank's part of the sums; zero except on the first TP rank of the last stage, so that a sum over
        the world counts every token once.
    """

    def collect(batch: MicroBatch, logits: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:  # noqa: ARG001
        return token_logprobs(logits, batch.select, batch.targets, temperature)

    results = _schedule(model, batches, collect, forward_only=True)
    sums = Sums()
    for batch, old in zip(batches, results, strict=False):  # no results before the last stage
        batch.old_logp = old
        if _counts():
            sums += mismatch(old, batch.engine_logp, batch.current, batch.valid, importance_cap)
    return sums


def update(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    batches: Sequence[MicroBatch],
    training: Training,
    temperature: float,
) -> tuple[Sums, float]:
    """One optimizer step on the whole batch.

    Returns:
        This rank's part of the sums, as :func:`logprob_pass` returns them, and the gradient's norm before
        clipping.
    """

    def loss(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        assert batch.old_logp is not None
        logp = token_logprobs(logits, batch.select, batch.targets, temperature)
        total, clipped = grpo_loss(
            logp,
            batch.old_logp,
            batch.engine_logp,
            batch.advantage,
            batch.valid,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            importance_cap=training.importance_cap,
        )
        # Megatron sums the counts over micro batches and DP ranks, and divides the gradients by the total.
        return total, batch.valid.sum().int(), Sums(loss=total.detach().double(), clipped=clipped.double())

    model.zero_grad_buffer()
    optimizer.zero_grad()
    results: list[Sums] = _schedule(model, batches, loss, forward_only=False)
    _, norm, _ = optimizer.step()  # type: ignore[misc]  # clips, then AdamW
    return sum(results, Sums()) if _counts() else Sums(), float(norm)


def _counts() -> bool:
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
