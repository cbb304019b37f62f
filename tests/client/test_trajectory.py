"""Responses and trajectories: what is refused, how they grow, and how their format does."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from roq import InvalidTrajectory, Response, Trajectory
from roq.trajectory import Column
from tests.protocol.play import trajectory


@pytest.mark.parametrize(
    "bad",
    [
        {"reward": None},
        {"reward": "a"},
        {"reward": 10**400},
        {"reward": float("nan")},
        {"segments": [(0,)]},
        {"segments": None},
        {"segments": [(2**70, 2)]},
        {"segments": [(1, 1), (0, 1)]},
        {"segments": [(0, 3)]},
        {"tokens": [-5, 3]},
        {"tokens": []},
        {"prompt": [-1]},
        {"prompt": []},
        {"logprobs": [-0.1]},
        {"logprobs": [-0.1, float("nan")]},
        {"logprobs": [-0.1, 0.5]},
        {"finish_reason": 7.5},
    ],
    ids=str,
)
def test_malformed_trajectories(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "prompt": [1],
        "tokens": [7, 8],
        "logprobs": [-0.1, -0.1],
        "segments": [(0, 2)],
        "reward": 1.0,
    }
    with pytest.raises(InvalidTrajectory):
        Trajectory(**good | bad)


@pytest.mark.parametrize("data", [b"", b"garbage", trajectory().encode()[:-3], b"\x80"])
def test_what_is_no_trajectory(data: bytes) -> None:
    with pytest.raises(InvalidTrajectory):
        Trajectory.decode(data)


def test_trajectories_round_trip() -> None:
    sent = trajectory(3, reward=1 / 3, tokens=9, newest=5)
    assert Trajectory.decode(sent.encode()) == sent


@pytest.mark.parametrize("value", [0.0, -0.0, 9e-4, -1e-45, -100.0, -3e38])
def test_log_probs_that_are_legal(value: float) -> None:
    assert len(Response([1], [value], [(0, 1)])) == 1


@pytest.mark.parametrize("value", [1.1e-3, 0.5, 2.0, 1e39, -1e39, float("inf"), float("-inf"), float("nan")])
def test_log_probs_that_are_not(value: float) -> None:
    with pytest.raises(InvalidTrajectory):
        Response([1, 2], [-0.1, value], [(0, 2)])


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31, 1.5, "1", None], ids=str)
def test_token_ids_that_are_not_legal(value: Any) -> None:
    with pytest.raises(InvalidTrajectory):
        Response([0, 2**31 - 1, value], [-0.1] * 3, [(0, 3)])


def test_spans_of_one_version_join() -> None:
    response = Response([1, 2], [-1.0, -1.0], [(0, 2)])
    response.extend(Response([3], [-2.0], [(0, 1)]))
    response.extend(Response())
    response.extend(Response([4, 5, 6], [-1.0] * 3, [(0, 1), (2, 2)]))
    assert response == Response([1, 2, 3, 4, 5, 6], [-1, -1, -2, -1, -1, -1], [(0, 4), (2, 2)])


def test_versions_do_not_fall() -> None:
    response = Response([1], [-1.0], [(3, 1)])
    with pytest.raises(InvalidTrajectory):
        response.extend(Response([2], [-1.0], [(2, 1)]))
    assert response == Response([1], [-1.0], [(3, 1)])


def changed(payload: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": b"\0" * 8},
        {"tokens": b"\0" * 11},
        {"tokens": [1, 2, 3]},
        {"logprobs": b""},
        {"logprobs": None},
        {"segments": [(0, 2)]},
        {"segments": [(1, 1), (0, 2)]},
        {"segments": [(0, 4), (0, -1)]},
        {"prompt": b""},
        {"reward": float("nan")},
        {"reward": "high"},
        {"finish_reason": 1},
    ],
    ids=str,
)
def test_a_payload_whose_fields_do_not_fit_together(fields: dict[str, object]) -> None:
    payload = trajectory(tokens=3).encode()
    assert Trajectory.decode(changed(payload, segments=[(0, 3)])) == trajectory(tokens=3)
    with pytest.raises(InvalidTrajectory):
        Trajectory.decode(changed(payload, **fields))


class Mask(Column[int]):
    """1 for a token that is trained."""

    dtype = "b"
    fill = 1


@dataclass(init=False, repr=False)
class Masked(Trajectory):
    mask: Mask = field(default_factory=Mask)
    source: str = "unknown"


def test_a_new_field_is_one_declaration() -> None:
    """Old readers ignore it, payloads without it have its default, and all else follows."""
    old = trajectory(tokens=2)
    new = Masked(**vars(old), mask=[0, 1])
    assert Trajectory.decode(new.encode()) == old
    assert Masked.decode(new.encode()) == new
    read = Masked.decode(old.encode())
    assert (read.mask.tolist(), read.source) == ([1, 1], "unknown")
    assert Masked(**vars(old)) == read
    read.extend(new)
    assert read.mask.tolist() == [1, 1, 0, 1]
    with pytest.raises(InvalidTrajectory):
        Masked(**vars(old), mask=[1])
    with pytest.raises(TypeError, match="maks"):
        Masked(**vars(old), maks=[1, 1])


def test_copies() -> None:
    sent = trajectory()
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert copy.deepcopy(sent) == sent
