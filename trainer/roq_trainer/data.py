"""From a taken batch to micro batches: every rank's share, fetched once, balanced and padded.

A batch's description (:class:`roq.Batch`: groups, rewards, lengths) is small and known to all ranks.
Its tokens are not: the groups are dealt to the data-parallel replicas, one rank of each replica
fetches only that replica's groups from Redis and hands them to its tensor- and pipeline-parallel peers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from roq.errors import SequenceTooLong
from roq.trajectory import Trajectory
from roq.types import Batch, BatchGroup
from roq_trainer.parallel import broadcast_bytes, model_parallel_group

__all__ = ["MicroBatch", "Sample", "deal", "fetch", "micro_batches", "micro_count"]


class _Payloads(Protocol):
    def trajectories(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]: ...


@dataclass
class Sample:
    """One trajectory with the number of its group and its advantage."""

    group: int
    trajectory: Trajectory
    advantage: float


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
    """Which groups (indices into ``batch.groups``) each data-parallel replica trains.

    Longest first, always to the replica with the fewest tokens so far that may still take one: no
    replica gets more than ``ceil(groups / replicas)``. Every rank computes the same answer.
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
    """Micro batches that every replica runs: as many as the fullest one needs."""
    return max(-(-sum(len(batch.groups[i].members) for i in share) // micro_batch_size) for share in shares)


def fetch(source: _Payloads | None, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
    """The trajectories of ``groups``; ``source`` is given on the first rank of a replica, None on its peers.

    Raises:
        RoqError: what the scheduler raises, on the fetching rank.
    """
    if source is not None and model_parallel_group() is None:
        return source.trajectories(groups)
    blob = b""
    if source is not None:
        encoded = [t.encode() for members in source.trajectories(groups) for t in members]
        header = array("q", [len(data) for data in encoded])
        blob = header.tobytes() + b"".join(encoded)
    blob = broadcast_bytes(blob, model_parallel_group())
    counts = [len(group.members) for group in groups]
    total = sum(counts)
    lengths = array("q", blob[: 8 * total])
    out: list[list[Trajectory]] = []
    at, index = 8 * total, 0
    for count in counts:
        members: list[Trajectory] = []
        for length in lengths[index : index + count]:
            members.append(Trajectory.decode(blob[at : at + length]))
            at += length
        index += count
        out.append(members)
    return out


def micro_batches(
    samples: Sequence[Sample],
    count: int,
    *,
    version: int,
    max_seq_tokens: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Cut this replica's samples into exactly ``count`` micro batches of neighbouring lengths.

    A replica with fewer samples than that gets fillers of one token that counts for nothing: all
    replicas must run the same number of passes, or their collectives would not meet.

    Raises:
        SequenceTooLong: names the group.
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
    rows = [torch.tensor(s.trajectory.prompt + s.trajectory.tokens, dtype=torch.int64) for s in samples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [b, s]; 0 is as good as any token
    width = tokens.shape[1]
    select, targets, engine, advantage, current = [], [], [], [], []
    for row, sample in enumerate(samples):
        t = sample.trajectory
        # The logits at the last prompt token predict the first response token.
        first = row * width + len(t.prompt) - 1
        select.append(torch.arange(first, first + len(t.tokens)))
        targets.append(torch.tensor(t.tokens, dtype=torch.int64))
        engine.append(torch.tensor(t.logprobs, dtype=torch.float32))
        advantage.append(torch.full((len(t.tokens),), sample.advantage, dtype=torch.float32))
        current += [torch.full((n,), float(v == version)) for v, n in t.segments]
    picked = torch.cat(select)
    return MicroBatch(
        tokens=tokens.to(device),
        positions=torch.arange(width).expand_as(tokens).contiguous().to(device),
        select=picked.to(device),
        targets=torch.cat(targets).to(device),
        engine_logp=torch.cat(engine).to(device),
        advantage=torch.cat(advantage).to(device),
        valid=torch.full(picked.shape, real, dtype=torch.float32, device=device),
        current=torch.cat(current).to(device),
    )
