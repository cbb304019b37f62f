"""A response in the making: the claim on it and the tokens so far."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from roq.postprocess import Member
from roq.trajectory import Prefix, Trajectory
from roq.types import Reservation
from roq_worker.engine import Delta

__all__ = ["Draft", "may_continue", "member_of", "seed_of"]


@dataclass
class Draft:
    """``tokens`` and ``logprobs``, both [T]; ``segments`` are (version, count) spans over them.

    ``handing_in``: its result or its failure is on the way, so that it is neither stopped nor handed back.
    """

    claim: Reservation
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    segments: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    task: asyncio.Task[None] | None = None
    handing_in: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        """What a cancellation names: group, member, token."""
        return self.claim.group, self.claim.member, self.claim.token

    @property
    def prefix(self) -> Prefix:
        """The response so far, for the scheduler to keep."""
        return Prefix(self.tokens, self.logprobs, self.segments)

    def add(self, more: Delta | Prefix) -> None:
        """Append what the engine gave, or what an earlier worker left; equal versions become one span."""
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        for version, count in more.segments:
            if self.segments and self.segments[-1][0] == version:
                count += self.segments.pop()[1]
            self.segments.append((version, count))


def seed_of(run_seed: int, claim: Reservation) -> int:
    """A sampling seed (63 bits) of its own for each attempt at each member of each prompt of a run."""
    parts: Sequence[int] = (run_seed, claim.ordinal, claim.member, claim.attempt)
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def may_continue(prefix: Prefix, version: int, partial: bool) -> bool:
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
