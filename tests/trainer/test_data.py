"""Distributing, splitting and padding of batches."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_support import VOCAB, make_batch

from roq import Trajectory
from roq.errors import SequenceTooLong
from roq.limits import Limits
from roq_trainer.data import Sample, deal, micro_batches, micro_count, read


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 50), st.integers(1, 6))
def test_every_group_is_dealt_once_and_all_replicas_run_as_many_passes(
    groups: int, size: int, replicas: int, seed: int, micro: int
) -> None:
    batch, payloads = make_batch(groups=groups, size=size, seed=seed)
    shares = deal(batch, replicas)
    assert sorted(i for share in shares for i in share) == list(range(groups))
    assert max(map(len, shares)) <= -(-groups // replicas)
    count = micro_count(batch, shares, micro)
    for share in shares:
        samples = [Sample(i, t, 1.0) for i in share for t in payloads[i]]
        cut = micro_batches(samples, count, version=batch.version, max_seq_tokens=64)
        assert len(cut) == count
        assert all(len(m.tokens) <= micro for m in cut)
        tokens = sorted(token for t in samples for token in t.trajectory.tokens)
        assert sorted(int(t) for m in cut for t in m.targets[m.valid > 0]) == tokens


def test_token_counts_are_balanced() -> None:
    batch, _ = make_batch(groups=16, size=4, seed=5, longest=200)
    sizes = [sum(m.tokens for m in g.members) for g in batch.groups]
    loads = [sum(sizes[i] for i in share) for share in deal(batch, 4)]
    assert max(loads) - min(loads) < max(sizes) / 2


def test_tokens_stand_where_the_logits_predict_them() -> None:
    long = Trajectory([5, 6], [7, 8, 9], [-0.1, -0.2, -0.3], [(1, 1), (2, 2)], 1.0)
    short = Trajectory([4], [3], [-0.4], [(2, 1)], 0.0)
    (found,) = micro_batches([Sample(1, short, -1.0), Sample(2, long, 2.0)], 1, version=2, max_seq_tokens=5)
    assert found.tokens.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert found.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert found.select.tolist() == [1, 2, 3, 5]
    assert found.targets.tolist() == [7, 8, 9, 3]
    assert torch.equal(found.tokens.flatten()[found.select + 1], found.targets)
    torch.testing.assert_close(found.engine_logp, torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert found.advantage.tolist() == [2.0, 2.0, 2.0, -1.0]
    assert found.current.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert found.valid.tolist() == [1.0] * 4


def test_a_replica_without_groups_runs_fillers() -> None:
    cut = micro_batches([], 2, version=0, max_seq_tokens=8)
    assert [float(m.valid.sum()) for m in cut] == [0.0, 0.0]
    assert all(len(m.targets) == 1 for m in cut)


def test_what_cannot_be_trained_is_told_by_group_and_member() -> None:
    batch, payloads = make_batch(groups=2, size=3)
    encoded = [t.encode() for members in payloads for t in members]
    limits = Limits(vocab_size=VOCAB, max_seq_tokens=64)
    read_back, unusable = read(batch.groups, encoded, batch.version, limits)
    assert read_back == payloads
    assert unusable == []

    def found(encoded: list[bytes], version: int = batch.version, limits: Limits = limits) -> set[int]:
        _, unusable = read(batch.groups, encoded, version, limits)
        return {(bad.group - 1) * 3 + bad.member - 1 for bad in unusable}

    for place, wrong in ((0, b"junk"), (2, b""), (4, encoded[3]), (5, encoded[0])):
        assert found([*encoded[:place], wrong, *encoded[place + 1 :]]) == {place}
    nan = msgspec.msgpack.decode(encoded[1])
    nan["logprobs"] = b"\xff" * len(nan["logprobs"])
    assert found([encoded[0], msgspec.msgpack.encode(nan), *encoded[2:]]) == {1}
    assert found(encoded, version=batch.version - 1) == set(range(6))  # of a version that does not exist yet
    flat = [t for members in payloads for t in members]
    for largest in (5, VOCAB - 1):
        expected = {i for i, t in enumerate(flat) if max([*t.prompt, *t.tokens]) >= largest}
        assert found(encoded, limits=Limits(vocab_size=largest)) == expected


def test_a_sequence_that_is_too_long_is_refused_by_name() -> None:
    sample = Sample(41, Trajectory([1, 2], [3, 4], [-1.0, -1.0], [(0, 2)], 0.0), 0.0)
    with pytest.raises(SequenceTooLong, match=r"group 41 .*batch 7 .*\b4\b"):
        micro_batches([sample], 1, version=7, max_seq_tokens=3)
