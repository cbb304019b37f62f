"""What a worker hands in and the trainer reads: the tokens of one response and how they came to be.

Kept free of numpy so that the core installs without it. ``numpy.frombuffer(t.tokens, "int32")`` and
``torch.frombuffer`` read the fields without a copy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from roq.errors import InvalidTrajectory

__all__ = ["Prefix", "Trajectory"]

_FORMAT = 1
_LARGEST = 2**53  # the library's numbers are doubles


def _int32(name: str, values: Iterable[int]) -> array[int]:
    try:
        ids = array("i", values)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidTrajectory(f"{name} must be token ids that fit int32: {error}") from None
    if ids and min(ids) < 0:
        raise InvalidTrajectory(f"{name} hold {min(ids)}; token ids are not negative")
    return ids


def _float32(name: str, values: Iterable[float]) -> array[float]:
    try:
        return array("f", values)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidTrajectory(f"{name} must be floats: {error}") from None


class _PrefixFields(msgspec.Struct):
    format: Literal[1]
    tokens: bytes
    logprobs: bytes
    segments: list[tuple[int, int]]


class _TrajectoryFields(_PrefixFields):
    prompt: bytes
    reward: float
    finish_reason: str


class Prefix:
    """The part of a response that exists so far.

    Attributes:
        tokens: response token ids, ``array('i')`` (int32), shape [T].
        logprobs: log-probability of each token under the weights that sampled it, in nats, after
            temperature, as the engine reported it; ``array('f')`` (float32), shape [T].
        segments: ``(version, count)`` spans in order; versions never fall, counts add up to T.

    Raises:
        InvalidTrajectory: when the fields do not fit together.
    """

    __slots__ = ("logprobs", "segments", "tokens")

    def __init__(
        self,
        tokens: Iterable[int] = (),
        logprobs: Iterable[float] = (),
        segments: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tokens = _int32("tokens", tokens)
        self.logprobs = _float32("logprobs", logprobs)
        try:
            self.segments: list[tuple[int, int]] = [(int(v), int(n)) for v, n in segments]
        except (TypeError, ValueError) as error:
            raise InvalidTrajectory(f"segments must be (version, count) pairs: {error}") from None
        self._check()

    def _check(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise InvalidTrajectory(
                f"{len(self.tokens)} tokens but {len(self.logprobs)} log-probs; each token needs one"
            )
        bad = next((i for i, p in enumerate(self.logprobs) if not p <= 1e-3 or math.isinf(p)), None)
        if bad is not None:
            raise InvalidTrajectory(
                f"log-prob {bad} is {self.logprobs[bad]}; log-probs are finite and at most 0"
            )
        if any(count <= 0 or not 0 <= version < _LARGEST for version, count in self.segments):
            raise InvalidTrajectory(f"segments {self.segments} hold an impossible version or an empty span")
        versions = [version for version, _ in self.segments]
        if versions != sorted(versions):
            raise InvalidTrajectory(f"segment versions {versions} fall; weights versions only rise")
        total = sum(count for _, count in self.segments)
        if total != len(self.tokens):
            raise InvalidTrajectory(f"segments cover {total} tokens but there are {len(self.tokens)}")

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights version in it; None while it is empty."""
        return self.segments[0][0] if self.segments else None

    @property
    def newest_version(self) -> int | None:
        """The newest weights version in it; None while it is empty."""
        return self.segments[-1][0] if self.segments else None

    def _fields(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "tokens": self.tokens.tobytes(),
            "logprobs": self.logprobs.tobytes(),
            "segments": self.segments,
        }

    def encode(self) -> bytes:
        """As msgpack; arrays are little-endian bytes."""
        return msgspec.msgpack.encode(self._fields())

    @classmethod
    def decode(cls, data: bytes) -> Prefix:
        """The inverse of :meth:`encode`.

        Raises:
            InvalidTrajectory: ``data`` is something else.
        """
        try:
            fields = msgspec.msgpack.decode(data, type=_PrefixFields)
            return cls(array("i", fields.tokens), array("f", fields.logprobs), fields.segments)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidTrajectory(f"this is no encoded prefix: {error}") from None

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.tokens)} tokens, segments={self.segments})"


class Trajectory(Prefix):
    """One finished response to one prompt.

    Attributes:
        prompt: prompt token ids, ``array('i')`` (int32), shape [P]; never empty.
        reward: the scalar reward; finite.
        finish_reason: why generation ended: ``"stop"`` or ``"length"``.

    The other attributes are those of :class:`Prefix`; ``tokens`` holds the response only.

    Raises:
        InvalidTrajectory: when the fields do not fit together.
    """

    __slots__ = ("finish_reason", "prompt", "reward")

    def __init__(
        self,
        prompt: Iterable[int],
        tokens: Iterable[int],
        logprobs: Iterable[float],
        segments: Sequence[tuple[int, int]],
        reward: float,
        finish_reason: str = "stop",
    ) -> None:
        self.prompt = _int32("prompt", prompt)
        try:
            self.reward = float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidTrajectory(f"the reward must be a number: {error}") from None
        self.finish_reason = finish_reason
        super().__init__(tokens, logprobs, segments)

    def _check(self) -> None:
        super()._check()
        if not self.prompt:
            raise InvalidTrajectory("the prompt is empty")
        if not isinstance(self.finish_reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTrajectory(f"finish_reason is {self.finish_reason!r}; it must be text")
        if not self.tokens:
            raise InvalidTrajectory("the response is empty; release the claim instead of completing it")
        if not math.isfinite(self.reward):
            raise InvalidTrajectory(f"the reward is {self.reward}; a failed rollout is released, not scored")

    def _fields(self) -> dict[str, Any]:
        return super()._fields() | {
            "prompt": self.prompt.tobytes(),
            "reward": self.reward,
            "finish_reason": self.finish_reason,
        }

    @classmethod
    def decode(cls, data: bytes) -> Trajectory:
        """The inverse of :meth:`encode`."""
        try:
            fields = msgspec.msgpack.decode(data, type=_TrajectoryFields)
            return cls(
                prompt=array("i", fields.prompt),
                tokens=array("i", fields.tokens),
                logprobs=array("f", fields.logprobs),
                segments=fields.segments,
                reward=fields.reward,
                finish_reason=fields.finish_reason,
            )
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidTrajectory(f"this is no encoded trajectory: {error}") from None
