"""What a run can train: checked where a trajectory is handed in, and again by the trainer.

A trajectory that the trainer cannot use would end it at every start, so a worker with another tokenizer, say,
must be told at once.
"""

from __future__ import annotations

import msgspec

from roq.trajectory import Trajectory

__all__ = ["LARGEST_REWARD", "SETTINGS", "Limits"]

LARGEST_REWARD = 1e9
"""The largest size of a reward or an advantage: sums of squared gradients must fit float32."""
SETTINGS = {
    "vocab_size": "model.vocab_size",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "max_tokens": "rollout.max_tokens",
    "max_seq_tokens": "trainer.max_seq_tokens",
}
"""Where a run keeps the limits: settings of its job (``roq.job.stored``)."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a run; None: not known, so not checked.

    Attributes:
        vocab_size: token ids are below it.
        max_prompt_tokens, max_tokens: of the prompt, and of the response.
        max_seq_tokens: of both together.
    """

    vocab_size: int | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_seq_tokens: int | None = None

    def problem(self, trajectory: Trajectory) -> str | None:
        """Why a trajectory cannot be trained in this run; None when it can."""
        prompt, response = trajectory.prompt, trajectory.tokens
        for what, length, most, setting in (
            ("the prompt", len(prompt), self.max_prompt_tokens, "max_prompt_tokens"),
            ("the response", len(response), self.max_tokens, "max_tokens"),
            ("prompt and response", len(prompt) + len(response), self.max_seq_tokens, "max_seq_tokens"),
        ):
            if most is not None and length > most:
                return f"{what} of {length} tokens exceeds {SETTINGS[setting]} = {most}"
        if self.vocab_size is not None and (largest := max(prompt + response)) >= self.vocab_size:
            return (
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}; "
                "the worker must use the model's own tokenizer"
            )
        if not abs(trajectory.reward) <= LARGEST_REWARD:
            return f"the reward {trajectory.reward} is larger than {LARGEST_REWARD:.0f}; scale rewards down"
        return None
