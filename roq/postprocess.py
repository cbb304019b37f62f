"""Post-processing of finished groups, before they are placed in a batch.

``[protocol] post_process = "module:function"`` names a function that a worker runs once over every group
whose members are all complete, in a separate process. It takes the data row (a dict, see
:mod:`roq.job.prompts`) and the members, and returns a :class:`Verdict`, or None to keep the group unchanged.
A call that raises or exceeds ``reward.timeout_s`` has failed; it is retried, up to ``max_attempts`` attempts
in total, and then the prompt is dead-lettered with the error. If the worker dies, another one takes over.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["Member", "PostProcessor", "Verdict", "grpo", "leave_one_out"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One finished trajectory of a group.

    Attributes:
        response: its text.
        tokens: its T token ids.
        logprobs: the engine's T log-probs, in nats.
        segments: (weights version, token count) spans; the counts add up to T.
        reward: the reward function's result.
        finish_reason: "stop" or "length".
    """

    response: str
    tokens: list[int]
    logprobs: list[float]
    segments: list[tuple[int, int]]
    reward: float
    finish_reason: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a group's post-processing.

    Attributes:
        keep: False filters the group; its slot is free at once.
        reason: why it is filtered, human-readable.
        advantages: one for each member, in order; None leaves them to the trainer (``reward - mean``).
    """

    keep: bool = True
    reason: str = ""
    advantages: list[float] | None = None


PostProcessor = Callable[[dict[str, Any], list[Member]], "Verdict | None"]


def grpo(_item: dict[str, Any], members: list[Member]) -> Verdict:
    """Reward minus the group's mean, over its sample standard deviation plus 1e-6.

    DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1. The trainer does the same by default.
    """
    rewards = [member.reward for member in members]
    mean = statistics.fmean(rewards)
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 1.0
    return Verdict(advantages=[(reward - mean) / (spread + 1e-6) for reward in rewards])


def leave_one_out(_item: dict[str, Any], members: list[Member]) -> Verdict:
    """Reward minus the mean of the other members' rewards; 0 for a group of one.

    RLOO: Ahmadian et al., "Back to Basics", arXiv 2402.14740, section 3.2.
    """
    rewards = [member.reward for member in members]
    others = len(rewards) - 1
    if others == 0:
        return Verdict(advantages=[0.0])
    total = sum(rewards)
    return Verdict(advantages=[reward - (total - reward) / others for reward in rewards])
