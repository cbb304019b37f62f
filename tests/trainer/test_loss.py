"""The loss against the formulas worked out by hand on a few numbers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from roq.postprocess import Member, grpo
from roq.types import Batch, BatchGroup, BatchMember
from roq_trainer.loss import advantages, batch_advantages, grpo_loss, mismatch


def one(logp: float, old: float, engine: float, advantage: float) -> tuple[float, float, float]:
    """Loss, clip count and gradient of a single token."""
    new = torch.tensor([logp], requires_grad=True)
    loss, clipped = grpo_loss(
        new,
        torch.tensor([old]),
        torch.tensor([engine]),
        torch.tensor([advantage]),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.28,
        importance_cap=2.0,
    )
    loss.backward()
    assert new.grad is not None
    return loss.item(), clipped.item(), new.grad.item()


def test_advantages_compare_a_group_with_itself() -> None:
    found = advantages([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5]], normalize=False)
    assert found == [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0]]
    scaled = advantages([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5]], normalize=True)
    spread = statistics.stdev([1.0, 0.0, 0.0, 1.0])
    assert scaled[0] == pytest.approx([0.5 / (spread + 1e-6) * sign for sign in (1, -1, -1, 1)])
    assert scaled[1] == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5], [0.1, 0.2, 0.7]])
def test_the_trainer_and_post_processing_agree(rewards: list[float]) -> None:
    members = [
        Member(
            response="", tokens=[1], logprobs=[0.0], segments=[(0, 1)], reward=reward, finish_reason="stop"
        )
        for reward in rewards
    ]
    assert grpo({}, members).advantages == pytest.approx(advantages([rewards], normalize=True)[0])


def test_single_trajectories_are_compared_with_the_batch() -> None:
    assert advantages([[1.0], [0.0], [0.5]], normalize=False) == [[0.5], [-0.5], [0.0]]
    assert advantages([[1.0]], normalize=True) == [[0.0]]


def test_at_ratio_one_the_gradient_is_the_weighted_advantage() -> None:
    weight = math.exp(-2.0 + 2.5)
    loss, clipped, grad = one(logp=-2.0, old=-2.0, engine=-2.5, advantage=0.7)
    assert (loss, clipped, grad) == pytest.approx((-weight * 0.7, 0.0, -weight * 0.7))


def test_the_importance_weight_is_truncated() -> None:
    loss, _, _ = one(logp=-1.0, old=-1.0, engine=-4.0, advantage=1.0)
    assert loss == pytest.approx(-2.0)
    loss, _, _ = one(logp=-1.0, old=-1.0, engine=-1e4, advantage=1.0)  # exp would be infinite
    assert loss == pytest.approx(-2.0)
    loss, _, _ = one(logp=-4.0, old=-4.0, engine=-1.0, advantage=1.0)  # small weights stay as they are
    assert loss == pytest.approx(-math.exp(-3.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "is_clipped"),
    [
        (1.5, 1.0, 1.28, True),  # up, and better: held at 1 + clip_high
        (1.2, 1.0, 1.2, False),
        (0.5, 1.0, 0.5, False),  # down although better: free to come back
        (0.5, -1.0, -0.8, True),  # down, and worse: held at 1 - clip_low
        (1.5, -1.0, -1.5, False),  # up although worse: free to come back
    ],
)
def test_the_ratio_is_clipped_where_it_went_far_enough(
    ratio: float, advantage: float, value: float, is_clipped: bool
) -> None:
    loss, clipped, grad = one(-3.0 + math.log(ratio), -3.0, -3.0, advantage)
    assert loss == pytest.approx(-value, rel=1e-5)
    assert clipped == float(is_clipped)
    assert (grad == 0) == is_clipped


def test_advantages_of_post_processing_go_first() -> None:
    def group(number: int, *members: tuple[float, float | None]) -> BatchGroup:
        return BatchGroup(
            group=number, ordinal=number, slot=number, v_traj=0, staleness=0,
            members=[
                BatchMember(member=m, reward=reward, tokens=1, v_traj=0, advantage=advantage)
                for m, (reward, advantage) in enumerate(members, 1)
            ],
        )  # fmt: skip

    batch = Batch(version=0, groups=[group(1, (0.0, 7.0), (1.0, -3.0)), group(2, (0.0, None), (1.0, None))])
    assert batch_advantages(batch, normalize=False) == [[7.0, -3.0], [-0.5, 0.5]]


def test_padding_counts_for_nothing() -> None:
    n = 6
    torch.manual_seed(0)
    logp, old, engine, advantage = (-torch.rand(n) for _ in range(4))
    valid = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    settings = {"clip_low": 0.1, "clip_high": 0.1, "importance_cap": 2.0}
    whole = grpo_loss(logp, old, engine, advantage, valid, **settings)
    real = grpo_loss(logp[:4], old[:4], engine[:4], advantage[:4], valid[:4], **settings)
    assert torch.equal(whole[0], real[0])
    assert torch.equal(whole[1], real[1])


def test_mismatch_sums() -> None:
    old = torch.tensor([-1.0, -2.0, -0.5, -9.0])
    engine = torch.tensor([-1.1, -2.0, -3.0, 0.0])
    current = torch.tensor([1.0, 0.0, 1.0, 1.0])
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = {name: float(value) for name, value in vars(mismatch(old, engine, current, valid, 2.0)).items()}
    ratios = [math.exp(0.1), 1.0, math.exp(2.5)]
    assert found == pytest.approx(
        {
            "k3": sum(r - 1 - math.log(r) for r in ratios),
            "outliers": 1.0,
            "abs_diff": 0.1 + 2.5,
            "abs_diff_tokens": 2.0,
            "importance": ratios[0] + 1.0 + 2.0,
            "truncated": 1.0,
            "tokens": 3.0,
            "prompt_tokens": 0.0,
            "loss": 0.0,
            "clipped": 0.0,
        },
        rel=1e-6,
    )
