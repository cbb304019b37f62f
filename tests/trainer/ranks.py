"""Run by the tests on one or more ranks: exercise the trainer's parts and write the results.

ranks.py parts TP PP DP MODEL OUT       logits, gradients, one update, export
ranks.py checkpoint TP PP DP MODEL OUT  train, save, restore, train on
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import save_file
from trainer_support import TEMPERATURE, VOCAB, make_batch

from roq.config import Training
from roq.limits import Limits
from roq.types import Batch, BatchGroup
from roq_trainer import checkpoint, data, loss, parallel, step, weights
from roq_trainer.cpu import megatron_device
from roq_trainer.model import build_model, build_optimizer, read_shape
from roq_trainer.models import ModelShape
from roq_trainer.sums import Sums


class Payloads:
    """Return the payloads of an invented batch, and record the requested groups."""

    def __init__(self, payloads: dict[int, list[data.Trajectory]]) -> None:
        self.by_group = payloads
        self.asked: list[int] = []

    def encoded_trajectories(self, groups: Sequence[BatchGroup]) -> list[bytes]:
        self.asked += [group.group for group in groups]
        return [trajectory.encode() for group in groups for trajectory in self.by_group[group.group]]


def cut(batch: Batch, payloads: list[list[data.Trajectory]], training: Training) -> list[data.MicroBatch]:
    """From a batch to its micro batches, as in the training loop."""
    shares = data.deal(batch, training.data_parallel)
    mine = shares[parallel_state.get_data_parallel_rank()]
    groups = [batch.groups[i] for i in mine]
    source = Payloads({g.group: p for g, p in zip(batch.groups, payloads, strict=True)})
    encoded = data.fetch(source if parallel.leads_replica() else None, groups)
    got, unusable = data.read(groups, encoded, batch.version, Limits(vocab_size=VOCAB))
    assert unusable == []
    assert source.asked == ([g.group for g in groups] if parallel.leads_replica() else [])
    rewards = [[member.reward for member in group.members] for group in batch.groups]
    scores = loss.advantages(rewards, training.normalize_advantage)
    samples = [
        data.Sample(group.group, trajectory, score)
        for i, group, members in zip(mine, groups, got, strict=True)
        for trajectory, score in zip(members, scores[i], strict=True)
    ]
    count = data.micro_count(batch, shares, training.micro_batch_size)
    return data.micro_batches(samples, count, version=batch.version, max_seq_tokens=training.max_seq_tokens)


def train(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, training: Training, version: int, seed: int
) -> tuple[Sums, float]:
    batch, payloads = make_batch(version=version + 1, seed=seed, groups=3)
    micro = cut(batch, payloads, training)
    mismatch_sums = step.logprob_pass(model, micro, TEMPERATURE, training.importance_cap)
    loss_sums, norm = step.update(model, optimizer, micro, training, TEMPERATURE)
    return parallel.world_sum(mismatch_sums + loss_sums), norm


def logits_of(model: DistributedDataParallel, shape: ModelShape, out: Path) -> None:
    tokens = torch.arange(24).reshape(2, 12) * 7 % shape.vocab
    positions = torch.arange(12).expand(2, 12).contiguous()
    found: list[torch.Tensor] = []

    def forward(_: object, stage: torch.nn.Module) -> tuple[torch.Tensor, object]:
        return stage(tokens, positions, None), lambda logits, non_loss_data: found.append(logits)

    with torch.no_grad():
        step.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=12,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
        for logits in found:
            full = gather_from_tensor_model_parallel_region(logits)
            if parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_data_parallel_rank() == 0:
                save_file({"logits": full.contiguous()}, out)


def parts(training: Training, shape: ModelShape, source: Path, out: Path) -> None:
    model = build_model(shape, torch.float32, training.tensor_parallel, training.pipeline_parallel)
    weights.load(model, shape, source)
    weights.export(model, shape, source, out / "same")
    logits_of(model, shape, out / "logits.safetensors")

    optimizer = build_optimizer(model, training, torch.float32)
    sums, norm = train(model, optimizer, training, version=2, seed=1)
    weights.export(model, shape, source, out / "updated")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    weights.export(model, shape, source, out / "grads")
    if dist.get_rank() == 0:
        torch.save(
            {"sums": {name: float(value) for name, value in vars(sums).items()}, "norm": norm},
            out / "result.pt",
        )


def checkpoints(training: Training, shape: ModelShape, source: Path, out: Path) -> None:
    def fresh() -> tuple[DistributedDataParallel, MegatronOptimizer]:
        model = build_model(shape, torch.float32, training.tensor_parallel, training.pipeline_parallel)
        weights.load(model, shape, source)
        return model, build_optimizer(model, training, torch.float32)

    root = out / "checkpoints"
    model, optimizer = fresh()
    assert checkpoint.newest(root) is None
    for version in range(5):
        if version in (1, 2, 3):
            checkpoint.save(root, version, model, optimizer, keep=2)
        train(model, optimizer, training, version, seed=version)
    weights.export(model, shape, source, out / "straight")
    assert multiprocessing.active_children() == []  # a killed trainer would leave them behind

    found = checkpoint.newest(root)
    assert found is not None
    assert found.name == "step_00000003"
    halved = msgspec.structs.replace(training, lr=training.lr / 2)
    optimizer = build_optimizer(model, halved, torch.float32)
    checkpoint.restore(found, model, optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {halved.lr}, "the job's, not the checkpoint's"
    model, optimizer = fresh()
    assert checkpoint.restore(found, model, optimizer) == 3
    for version in range(3, 5):
        train(model, optimizer, training, version, seed=version)
    weights.export(model, shape, source, out / "resumed")


def main() -> None:
    what, tp, pp, dp, source, out = sys.argv[1:]
    training = Training(
        tensor_parallel=int(tp), pipeline_parallel=int(pp), data_parallel=int(dp), lr=1e-3, grad_clip=0.0,
        micro_batch_size=4, max_seq_tokens=64, weight_decay=0.01,
    )  # fmt: skip
    Path(out).mkdir(parents=True, exist_ok=True)
    parallel.open_world()
    parallel.open_parallel(training, seed=0)
    with megatron_device():
        for folder in sorted(Path(source).glob("*" if what == "parts" else "qwen3-tied")):
            exercise = {"parts": parts, "checkpoint": checkpoints}[what]
            exercise(training, read_shape(folder), folder, Path(out) / folder.name)
            dist.barrier()
    parallel.close()


if __name__ == "__main__":
    main()
