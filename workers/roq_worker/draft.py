"""An unfinished response: its claim and the tokens so far."""

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
    """A claim and the response generated so far.

    ``handing_in``: its result or failure is being sent, so it is neither stopped nor released.
    """

    claim: Reservation
    response: Response = field(default_factory=Response)
    task: asyncio.Task[None] | None = None
    handing_in: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        """Group, member and token, by which a cancellation identifies the claim."""
        return self.claim.group, self.claim.member, self.claim.token


def seed_of(run_seed: int, claim: Reservation) -> int:
    """The sampling seed (63 bits): different for each attempt at each member of each prompt of a run."""
    parts: Sequence[int] = (run_seed, claim.ordinal, claim.member, claim.attempt)
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def may_continue(prefix: Response, version: int, partial: bool) -> bool:
    """Return True if an engine with weights ``version`` may continue the tokens of an earlier worker.

    Versions never decrease within a trajectory: a prefix with newer weights is generated again. Without
    partial rollout (``partial``) a trajectory has one version.
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
