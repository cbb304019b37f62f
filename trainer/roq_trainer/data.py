"""From a taken batch to micro batches: fetch each replica's share once, balance and pad it.

All ranks have the batch's description (:class:`roq.Batch`: groups, rewards, lengths), which is small.
The groups are distributed over the data-parallel replicas; one rank of each replica fetches that
replica's groups from Redis and broadcasts them to its tensor- and pipeline-parallel peers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from roq.errors import InvalidTrajectory, SequenceTooLong
from roq.limits import LARGEST_REWARD, Limits
from roq.trajectory import Trajectory
from roq.types import Batch, BatchGroup, BatchMember
from roq_trainer.parallel import broadcast_bytes, model_parallel_group

__all__ = ["MicroBatch", "Sample", "Unusable", "deal", "fetch", "micro_batches", "micro_count", "read"]


class _Payloads(Protocol):
    def encoded_trajectories(self, groups: Sequence[BatchGroup]) -> list[bytes]: ...


@dataclass
class Sample:
    """One trajectory with the number of its group and its advantage."""

    group: int
    trajectory: Trajectory
    advantage: float


@dataclass
class Unusable:
    """A trajectory that cannot be trained, who made it, and why."""

    group: int
    member: int
    worker: str
    reason: str


@dataclass
class MicroBatch:
    """Right-padded sequences of one forward pass, and the N response tokens in them.

    Attributes:
        tokens, positions: int64 [b, s].
        select: int64 [N], position in the flattened [b * s] whose logits predict the token.
        targets: int64 [N].
        engine_logp, advantage, valid, current: float32 [N]; ``valid`` is 0 for a filler token,
            ``current`` is 1 where the token was sampled with the version now being trained.
        old_logp: float32 [N] on the last pipeline stage once the log-prob pass has run.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    select: torch.Tensor
    targets: torch.Tensor
    engine_logp: torch.Tensor
    advantage: torch.Tensor
    valid: torch.Tensor
    current: torch.Tensor
    old_logp: torch.Tensor | None = None


def deal(batch: Batch, replicas: int) -> list[list[int]]:
    """The groups (indices into ``batch.groups``) that each data-parallel replica trains.

    Longest first, to the replica with the fewest tokens so far, at most ``ceil(groups / replicas)`` each.
    Every rank computes the same result.
    """
    sizes = [sum(member.tokens for member in group.members) for group in batch.groups]
    cap = -(-len(sizes) // replicas)
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        to = min((r for r in range(replicas) if len(shares[r]) < cap), key=lambda r: (loads[r], r))
        shares[to].append(index)
        loads[to] += sizes[index]
    return [sorted(share) for share in shares]


def micro_count(batch: Batch, shares: Sequence[Sequence[int]], micro_batch_size: int) -> int:
    """The number of micro batches that every replica runs, which is what the fullest one needs."""
    return max(-(-sum(len(batch.groups[i].members) for i in share) // micro_batch_size) for share in shares)


def fetch(source: _Payloads | None, groups: Sequence[BatchGroup]) -> list[bytes | memoryview]:
    """The encoded trajectories of ``groups``; ``source`` is None except on the first rank of a replica.

    Raises:
        RoqError: raised by the scheduler, on the fetching rank.
    """
    encoded: Sequence[bytes | memoryview] = [] if source is None else source.encoded_trajectories(groups)
    group = model_parallel_group()
    if group is not None:
        encoded = _broadcast_all(encoded, sum(len(group.members) for group in groups), group)
    return list(encoded)


def read(
    groups: Sequence[BatchGroup], encoded: Sequence[bytes | memoryview], version: int, limits: Limits
) -> tuple[list[list[Trajectory]], list[Unusable]]:
    """Decode and check the trajectories of ``groups``, as :func:`fetch` returned them.

    Args:
        version: of the batch. limits: what the model and the job allow.

    Returns:
        the trajectories of each group, and those that cannot be trained: their groups must not be.
    """
    payloads = iter(encoded)
    trajectories: list[list[Trajectory]] = []
    unusable: list[Unusable] = []
    for group in groups:
        trajectories.append([])
        for member in group.members:
            try:
                trajectory = Trajectory.decode(next(payloads))
                _check(trajectory, member, version, limits)
                trajectories[-1].append(trajectory)
            except InvalidTrajectory as error:
                unusable.append(Unusable(group.group, member.member, member.worker, str(error)))
    return trajectories, unusable


def _check(trajectory: Trajectory, member: BatchMember, version: int, limits: Limits) -> None:
    """Check what decoding does not: the values, the record that the advantages come from, and the limits.

    Raises:
        InvalidTrajectory: names the first thing that is wrong.
    """
    for column in (trajectory.prompt, trajectory.tokens, trajectory.logprobs):
        column.check()
    for what, value, recorded in (
        ("reward", trajectory.reward, member.reward),
        ("number of tokens", len(trajectory.tokens), member.tokens),
        ("oldest version", trajectory.oldest_version, member.v_traj),
    ):
        if value != recorded:
            raise InvalidTrajectory(f"its {what} is {value}, but {recorded} was recorded")
    if (trajectory.newest_version or 0) > version:
        raise InvalidTrajectory(f"it has tokens of version {trajectory.newest_version}, newer than {version}")
    if member.advantage is not None and not abs(member.advantage) <= LARGEST_REWARD:
        raise InvalidTrajectory(f"its advantage is {member.advantage}")
    problem = limits.problem(trajectory)
    if problem is not None:
        raise InvalidTrajectory(problem)


def _broadcast_all(
    items: Sequence[bytes | memoryview], count: int, group: dist.ProcessGroup
) -> list[memoryview]:
    """The ``count`` items of the group's first rank, on every rank of it."""
    header = array("q", map(len, items))
    data = broadcast_bytes(bytearray().join((header.tobytes(), *items)), group)
    ends = list(accumulate(data[: 8 * count].cast("q"), initial=8 * count))
    return [data[start:end] for start, end in pairwise(ends)]


def micro_batches(
    samples: Sequence[Sample],
    count: int,
    *,
    version: int,
    max_seq_tokens: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Split this replica's samples into exactly ``count`` micro batches of similar lengths.

    A replica with fewer samples gets fillers of one token with ``valid`` 0: all replicas must run the same
    number of passes, or their collectives would not match.

    Raises:
        SequenceTooLong: a sequence has more than ``max_seq_tokens`` tokens.
    """
    for sample in samples:
        length = len(sample.trajectory.prompt) + len(sample.trajectory.tokens)
        if length > max_seq_tokens:
            raise SequenceTooLong(
                f"group {sample.group} of batch {version} has a sequence of {length} tokens; raise "
                f"trainer.max_seq_tokens = {max_seq_tokens}, or lower rollout.max_tokens"
            )
    ordered = sorted(samples, key=lambda s: -(len(s.trajectory.prompt) + len(s.trajectory.tokens)))
    size, larger = divmod(len(ordered), count)
    out: list[MicroBatch] = []
    at = 0
    for index in range(count):
        n = size + (index < larger)
        out.append(_collate(ordered[at : at + n], version, device))
        at += n
    return out


def _collate(samples: Sequence[Sample], version: int, device: torch.device | str) -> MicroBatch:
    if not samples:
        filler = Trajectory(prompt=[0], tokens=[0], logprobs=[0.0], segments=[(0, 1)], reward=0.0)
        samples, real = [Sample(0, filler, 0.0)], 0.0
    else:
        real = 1.0
    rows = [_ints(s.trajectory.prompt + s.trajectory.tokens) for s in samples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).long()  # [b, s]; pads with token 0
    width = tokens.shape[1]
    select, targets, engine, advantage, current = [], [], [], [], []
    for row, sample in enumerate(samples):
        t = sample.trajectory
        # The logits at the last prompt token predict the first response token.
        first = row * width + len(t.prompt) - 1
        select.append(torch.arange(first, first + len(t.tokens)))
        targets.append(_ints(t.tokens))
        engine.append(torch.frombuffer(t.logprobs, dtype=torch.float32))
        advantage.append(torch.full((len(t.tokens),), sample.advantage, dtype=torch.float32))
        current += [torch.full((n,), float(v == version)) for v, n in t.segments]
    picked = torch.cat(select)
    return MicroBatch(
        tokens=tokens.to(device),
        positions=torch.arange(width).expand_as(tokens).contiguous().to(device),
        select=picked.to(device),
        targets=torch.cat(targets).long().to(device),
        engine_logp=torch.cat(engine).to(device),
        advantage=torch.cat(advantage).to(device),
        valid=torch.full(picked.shape, real, dtype=torch.float32, device=device),
        current=torch.cat(current).to(device),
    )


def _ints(ids: array[int]) -> torch.Tensor:
    return torch.frombuffer(ids, dtype=torch.int32)
