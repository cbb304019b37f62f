"""A response in the making: the claim on it and the tokens so far."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from roq.postprocess import Member
from roq.trajectory import Response, Trajectory
from roq.types import Reservation

__all__ = ["Draft", "may_continue", "member_of", "seed_of"]


@dataclass
class Draft:
    """``response``: what is generated so far.

    ``handing_in``: its result or its failure is on the way, so that it is neither stopped nor handed back.
    """

    claim: Reservation
    response: Response = field(default_factory=Response)
    task: asyncio.Task[None] | None = None
    handing_in: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        """What a cancellation names: group, member, token."""
        return self.claim.group, self.claim.member, self.claim.token


def seed_of(run_seed: int, claim: Reservation) -> int:
    """A sampling seed (63 bits) of its own for each attempt at each member of each prompt of a run."""
    parts: Sequence[int] = (run_seed, claim.ordinal, claim.member, claim.attempt)
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def may_continue(prefix: Response, version: int, partial: bool) -> bool:
    """Whether an engine of ``version`` may go on from the tokens that an earlier worker left.

    Versions never fall within a trajectory: tokens of newer weights are made anew. Without partial rollout
    (``partial``) a trajectory is of one version.
    """
    newest = prefix.newest_version or 0
    return newest <= version if partial else all(of == version for of, _ in prefix.segments)


def member_of(trajectory: Trajectory, response: str) -> Member:
    """A finished trajectory as a post-processing function sees it."""
    return Member(
        response=response,
        tokens=list(trajectory.tokens),
        logprobs=list(trajectory.logprobs),
        segments=list(trajectory.segments),
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
    )
