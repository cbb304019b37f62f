"""The payload that a worker sends and the trainer reads: a response, its log-probs and its weights versions.

The fields of a payload are declared once, as the fields of :class:`Response` and :class:`Trajectory`;
encoding, decoding and the checks follow from their types. A reader ignores fields that it does not know, and
a payload without a field gets the field's default, so a new field needs a default: for a column both ``fill``
and ``field(default_factory=...)``. A column also adds to a run's memory (:mod:`roq.job.memory`).

Constructors check the values. Decoding checks only that the fields are consistent.

The core does not depend on numpy. ``torch.frombuffer(t.tokens, dtype=torch.int32)`` and
``numpy.frombuffer(t.tokens, "int32")`` read a column without a copy.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_type_hints

import msgspec

from roq.errors import InvalidTrajectory

__all__ = ["Column", "LogProbs", "PromptIds", "Response", "TokenIds", "Trajectory"]

T = TypeVar("T", int, float)
_LARGEST = 2**53  # the library's numbers are doubles


if TYPE_CHECKING:
    _Array = array
else:

    class _Array(array):
        __class_getitem__ = classmethod(GenericAlias)  # array has none before Python 3.12


class Column(_Array[T]):
    """A field that is an array of little-endian numbers, one for each token.

    A subclass names their type and checks the values. ``fill`` is the value for every token if the field is
    missing; None if the field is required.
    """

    dtype: ClassVar[str]  # a type code of the module array
    per_token: ClassVar[bool] = True  # of the response; False for a column of another length
    fill: ClassVar[float | None] = None

    def __new__(cls, values: Iterable[T] = ()) -> Self:
        """Make a column of checked values.

        Raises:
            InvalidTrajectory: a value has the wrong type, or is not legal.
        """
        try:
            data = values if isinstance(values, array) else cls._pack(values)
            column = super().__new__(cls, cls.dtype, data)
        except (TypeError, OverflowError, ValueError, struct.error) as error:
            raise InvalidTrajectory(f"{cls.__name__} do not fit the type {cls.dtype!r}: {error}") from None
        column.check()
        return column

    @classmethod
    def _pack(cls, values: Iterable[T]) -> bytes:
        items = tuple(values)
        return struct.pack(f"{len(items)}{cls.dtype}", *items)  # twice as fast as array is

    @classmethod
    def of_bytes(cls, data: bytes) -> Self:
        """A column from bytes, without checking the values."""
        column = super().__new__(cls, cls.dtype)
        column.frombytes(data)
        return column

    def check(self) -> None:
        """Raise InvalidTrajectory for an illegal value. Must run at C speed: responses are long."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return self.of_bytes, (self.tobytes(),)


class TokenIds(Column[int]):
    """int32; not negative."""

    dtype = "i"

    def check(self) -> None:
        if not self.tobytes()[3::4].isascii():  # the sign bits
            raise InvalidTrajectory(f"a token id is {min(self)}; token ids are not negative")


class PromptIds(TokenIds):
    """The token ids of a prompt."""

    per_token = False


class LogProbs(Column[float]):
    """float32, in nats; finite, and at most 0 up to rounding."""

    dtype = "f"
    # High bytes (the sign and most of the exponent) of numbers that are certainly finite and below 5e-4.
    _legal = bytes([*range(0x3A), *range(0x80, 0xFF)])

    def check(self) -> None:
        if self.tobytes()[3::4].translate(None, self._legal):
            bad = next((i for i, p in enumerate(self) if not -math.inf < p <= 1e-3), None)
            if bad is not None:
                raise InvalidTrajectory(f"log-prob {bad} is {self[bad]}; log-probs are finite and at most 0")


@dataclass(init=False, repr=False)
class Response:
    """The tokens of a response, complete or so far.

    Attributes:
        tokens: token ids, int32, shape [T].
        logprobs: log-probability of each token under the weights that sampled it, in nats, after
            temperature, as the engine reported it; float32, shape [T].
        segments: ``(version, count)`` spans in order; versions never fall, counts add up to T.

    Raises:
        InvalidTrajectory: the fields are inconsistent.
    """

    tokens: TokenIds
    logprobs: LogProbs
    segments: list[tuple[int, int]]

    def __init__(
        self,
        tokens: Iterable[int] = (),
        logprobs: Iterable[float] = (),
        segments: Iterable[tuple[int, int]] = (),
        **more: Iterable[float],
    ) -> None:
        given: dict[str, Iterable[float]] = {"tokens": tokens, "logprobs": logprobs, **more}
        for name, column in _columns(type(self)).items():
            setattr(self, name, column(given.pop(name, ())))
        if given:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(given)}")
        try:
            self.segments = [(int(version), int(count)) for version, count in segments]
        except (TypeError, ValueError) as error:
            raise InvalidTrajectory(f"segments must be (version, count) pairs: {error}") from None
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check that the fields are consistent; decoding does this too."""
        length = len(self.tokens)
        for name, kind in _columns(type(self)).items():
            column: Column[Any] = getattr(self, name)
            if kind.fill is not None and not column:
                column.extend(array(kind.dtype, [kind.fill]) * length)
            if len(column) != length:
                raise InvalidTrajectory(f"{length} tokens but {len(column)} {name}; each token needs one")
        if any(count <= 0 or not 0 <= version < _LARGEST for version, count in self.segments):
            raise InvalidTrajectory(f"segments {self.segments} contain an invalid version or an empty span")
        versions = [version for version, _ in self.segments]
        if versions != sorted(versions):
            raise InvalidTrajectory(f"segment versions {versions} fall; weights versions only rise")
        total = sum(count for _, count in self.segments)
        if total != length:
            raise InvalidTrajectory(f"segments cover {total} tokens but there are {length}")

    def extend(self, more: Response) -> None:
        """Append the tokens generated next; adjacent spans of one version are merged.

        Raises:
            InvalidTrajectory: ``more`` starts with an older version than this response ends with.
        """
        if self.segments and more.segments and more.segments[0][0] < self.segments[-1][0]:
            raise InvalidTrajectory(f"version {more.segments[0][0]} follows version {self.segments[-1][0]}")
        for name in _columns(type(self)):
            getattr(self, name).extend(getattr(more, name))
        for version, count in more.segments:
            if self.segments and self.segments[-1][0] == version:
                count += self.segments.pop()[1]
            self.segments.append((version, count))

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights version in it; None if it is empty."""
        return self.segments[0][0] if self.segments else None

    @property
    def newest_version(self) -> int | None:
        """The newest weights version in it; None if it is empty."""
        return self.segments[-1][0] if self.segments else None

    def encode(self) -> bytes:
        """Encode as a msgpack map of the fields; columns are little-endian bytes."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """The inverse of :meth:`encode`.

        Raises:
            InvalidTrajectory: ``data`` is not an encoded payload of this class.
        """
        try:
            return _decoder(cls).decode(data)
        except msgspec.MsgspecError as error:
            raise InvalidTrajectory(f"not an encoded {cls.__name__.lower()}: {error}") from None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens, segments={self.segments})"


@dataclass(init=False, repr=False)
class Trajectory(Response):
    """One finished response to one prompt.

    Attributes:
        prompt: prompt token ids, int32, shape [P]; never empty.
        reward: the scalar reward; finite.
        finish_reason: why generation ended: ``"stop"`` or ``"length"``.

    The other attributes are those of :class:`Response`; ``tokens`` holds only the response.

    Raises:
        InvalidTrajectory: the fields are inconsistent.
    """

    prompt: PromptIds
    reward: float
    finish_reason: str = "stop"

    def __init__(
        self,
        prompt: Iterable[int],
        tokens: Iterable[int],
        logprobs: Iterable[float],
        segments: Iterable[tuple[int, int]],
        reward: float,
        finish_reason: str = "stop",
        **more: Iterable[float],
    ) -> None:
        self.prompt = PromptIds(prompt)
        try:
            self.reward = float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidTrajectory(f"the reward must be a number: {error}") from None
        self.finish_reason = finish_reason
        super().__init__(tokens, logprobs, segments, **more)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise InvalidTrajectory("the prompt is empty")
        if not isinstance(self.finish_reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTrajectory(f"finish_reason is {self.finish_reason!r}; it must be text")
        if not self.tokens:
            raise InvalidTrajectory("the response is empty; release the claim instead of completing it")
        if not math.isfinite(self.reward):
            raise InvalidTrajectory(f"the reward is {self.reward}; it must be finite: fail the claim instead")


@cache
def _columns(cls: type[Response]) -> dict[str, type[Column[Any]]]:
    """The fields with one value for each token of the response."""
    kinds = get_type_hints(cls).items()
    return {name: kind for name, kind in kinds if isinstance(kind, type) and _per_token(kind)}


def _per_token(kind: type) -> bool:
    return issubclass(kind, Column) and kind.per_token


_encoder = msgspec.msgpack.Encoder(enc_hook=memoryview)


@cache
def _decoder(cls: type[Any]) -> Any:
    def column(kind: type[Column[Any]], data: bytes) -> Column[Any]:
        return kind.of_bytes(data)

    return msgspec.msgpack.Decoder(cls, dec_hook=column)
