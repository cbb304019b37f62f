"""Lengths: drawn, or read from a trace."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from roq.errors import ConfigError
from roq.sim.workload import Lengths, Lognormal, Workload, load_trace


def test_the_lognormal_is_what_it_says() -> None:
    workload = Lognormal(groups=4000, cap=10**9).draw(0, 8)
    logs = np.log([group.responses for group in workload.groups])
    assert np.exp(np.median(logs)) == pytest.approx(6060, rel=0.03)
    assert logs.std() == pytest.approx(0.76, rel=0.03)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.58, abs=0.03)


def test_lengths_are_a_function_of_the_seed_and_do_not_depend_on_their_number() -> None:
    few, more = Lognormal(groups=3), Lognormal(groups=5)
    assert few.draw(1, 4).groups == more.draw(1, 4).groups[:3]
    assert [g.responses[:2] for g in few.draw(1, 4).groups] == [g.responses for g in few.draw(1, 2).groups]
    assert few.draw(1, 4).groups != few.draw(2, 4).groups


def test_caps_hold() -> None:
    workload = Lognormal(groups=300, sigma=3.0).draw(0, 4)
    assert max(max(group.responses) for group in workload.groups) == 38912
    assert min(min(group.responses) for group in workload.groups) >= 1
    assert all(1 <= group.prompt <= 1024 for group in workload.groups)


def test_the_mean_context_is_that_of_a_running_request() -> None:
    """Lengths 1 and 9: nine of ten seconds are spent in the long one, of 2 + 4.5 tokens on average."""
    workload = Workload([Lengths(2, (1,)), Lengths(2, (9,))], "")
    assert workload.context_mean == pytest.approx(0.1 * 2.5 + 0.9 * 6.5)
    assert workload.response_mean == 5
    assert workload.tokens_mean == 7
    assert workload.longest == 11


def test_a_trace_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": 3, "responses": [5, 6]}\n\n{"prompt": 4, "responses": [7, 8, 9]}\n')
    workload = load_trace(path, 2)
    assert workload[2] == workload[0] == Lengths(3, (5, 6))
    assert "trace.jsonl.gz: 2 groups" in workload.assumed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace\.jsonl"),
        ('{"prompt": 3, "responses": [5]}', r"line 1\b.*\b1\b.*\b2\b"),
        ('{"prompt": 3, "responses": [5, 0]}', "line 1"),
        ('{"prompt": 3}', "line 1"),
        ("no json", "line 1"),
    ],
)
def test_traces_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(tmp_path / "trace.jsonl", 2)


def test_no_such_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_trace(tmp_path / "nothing.jsonl", 2)
