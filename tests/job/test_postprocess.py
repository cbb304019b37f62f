"""The built-in post-processing functions."""

from __future__ import annotations

import math

import pytest

from roq.postprocess import Member, grpo, leave_one_out


def group(*rewards: float) -> list[Member]:
    return [
        Member(response="", tokens=[1], logprobs=[-1.0], segments=[(0, 1)], reward=r, finish_reason="stop")
        for r in rewards
    ]


def test_grpo() -> None:
    verdict = grpo({}, group(0.0, 1.0, 1.0))
    assert verdict.keep
    spread = math.sqrt(1 / 3) + 1e-6  # the sample deviation of 0, 1, 1
    assert verdict.advantages == pytest.approx([-2 / 3 / spread, 1 / 3 / spread, 1 / 3 / spread])
    assert grpo({}, group(1.0)).advantages == [0.0]


def test_leave_one_out() -> None:
    assert leave_one_out({}, group(0.0, 1.0, 0.5)).advantages == pytest.approx([-0.75, 0.75, 0.0])
    assert leave_one_out({}, group(0.3)).advantages == [0.0]
