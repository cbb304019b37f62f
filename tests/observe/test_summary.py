"""The summary from recorded metrics: right over restarts, replays and torn lines."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq import RunConfig
from roq.observe.metrics_log import Records
from roq.observe.plots import write_summary_plot
from roq.observe.summary import Summary, covered, summarize, summary_lines, write_summary
from roq.observe.timeline import timeline_of
from roq.types import Ledger, Status

CONFIG = RunConfig(eta=1, batch_size=4, group_size=2)
STATUS = Status(run="demo", version=6, ended=True, ledger=Ledger(issued=27, trained=24, in_slots=2, dead=1))


def step(batch: int, time: float, wall_s: float, **more: Any) -> dict[str, Any]:
    """The line of the step that trained batch ``batch``, from 0."""
    return {
        "step": batch + 1,
        "time": time,
        "reward/mean": batch / 10,
        "staleness/mean": 0.5,
        "staleness/max": min(batch, 1),
        "staleness/counts": {"0": 4, "1": 4} if batch else {"0": 8},
        "groups": 4,
        "trajectories": 8,
        "tokens/response": 100,
        "mismatch/abs_diff_mean": None,
        "mismatch/abs_diff_tokens": 0,
        "time/wait_for_batch": 1.0,
        "time/step": 2.0,
        "scheduler_s": wall_s / 1000,
        "wall_s": wall_s,
        "rss_bytes": 500 + batch,
        "replay": False,
        "a key that came later": 1,
    } | more


def worker(time: float, wall_s: float, tokens: int, **more: Any) -> dict[str, Any]:
    row = {"time": time, "worker": "w", "version": 1, "wall_s": wall_s, "tokens": tokens}
    return (
        row
        | {"idle_s": wall_s / 10, "blocked_s": wall_s / 5, "scheduler_s": wall_s / 200, "rss_bytes": 9000}
        | more
    )


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Two trainer processes (steps 3 and 4 trained again by the second) and three worker processes."""
    metrics = tmp_path / "metrics.jsonl"
    write(metrics, [step(i, 1003 + 3 * i, 3.0 * (i + 1)) for i in range(4)])  # 1000 to 1012
    with metrics.open("a") as file:
        file.write('{"step": 5, "time": 10')  # killed in the middle of a line
        file.write("\n")
    again = {"reward/mean": 0.9, "replay": True}
    write(
        metrics,
        [step(2, 1023, 3.0, **again), step(3, 1026, 6.0, **again), step(4, 1029, 9.0), step(5, 1032, 12.0)],
    )
    write(tmp_path / "workers/a.jsonl", [worker(1005, 5, 300), worker(1010, 10, 600)])  # killed at 1010
    write(tmp_path / "workers/b.jsonl", [worker(1005, 5, 300), worker(1014, 14, 800, done=True)])
    write(
        tmp_path / "workers/c.jsonl",
        [worker(1035, 15, 1000, rss_bytes=9999), worker(1040, 20, 1200, done=True)],
    )
    found = Records(tmp_path)
    assert found.read()
    return found


def test_totals_are_right_over_restarts(records: Records) -> None:
    summary = summarize(records, STATUS, CONFIG, [], 77)
    assert summary.steps == 6
    assert summary.staleness_histogram == {"0": 8 + 5 * 4, "1": 5 * 4}
    assert summary.max_staleness == 1
    assert summary.batches_full == 6
    # a step trained twice counts once, with its last line
    assert summary.reward_first5 == pytest.approx((0.0 + 0.1 + 0.9 + 0.9 + 0.4) / 5)
    assert summary.reward_last5 == pytest.approx((0.1 + 0.9 + 0.9 + 0.4 + 0.5) / 5)
    # at work from 1000 to 1014 and from 1020 to 1040; the pause between counts for nothing
    assert summary.wall_s == pytest.approx(14 + 20)
    assert summary.tokens_per_s == pytest.approx((600 + 800 + 1200) / 34, abs=0.1)
    assert summary.wait_s.trainer == pytest.approx(8)
    assert summary.wait_s.workers == pytest.approx(1 + 1.4 + 2)
    assert summary.blocked_s == pytest.approx(2 + 2.8 + 4)
    assert summary.scheduler_share.worker == pytest.approx(1 / 200)
    assert summary.scheduler_share.trainer == pytest.approx(1 / 1000)
    assert (summary.trainer_processes, summary.worker_processes) == (2, 3)
    assert msgspec.structs.asdict(summary.rss_bytes) == {"server": 77, "worker": 9999, "trainer": 505}


def test_a_second_process_that_is_older_at_its_first_step(tmp_path: Path) -> None:
    """Its clock is ahead of the first process's last one: only the time of its start tells them apart."""
    write(tmp_path / "metrics.jsonl", [step(0, 1002, 2.0), step(1, 1030, 10.0)])
    records = Records(tmp_path)
    records.read()
    summary = summarize(records, STATUS, CONFIG, [], None)
    assert summary.trainer_processes == 2
    assert summary.wall_s == pytest.approx(12)


def test_logprob_difference_is_weighted_by_tokens(tmp_path: Path) -> None:
    rows = [(1e-4, 100), (3e-4, 300), (None, 0)]
    write(
        tmp_path / "metrics.jsonl",
        [
            step(i, 1000 + i, i + 1.0, **{"mismatch/abs_diff_mean": mean, "mismatch/abs_diff_tokens": tokens})
            for i, (mean, tokens) in enumerate(rows)
        ],
    )
    records = Records(tmp_path)
    records.read()
    assert summarize(records, STATUS, CONFIG, [], None).logprob_abs_diff_mean == pytest.approx(2.5e-4)


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert not records.read()
    write(tmp_path / "metrics.jsonl", [step(0, 1, 1, loss=float("nan"))])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, ')
    assert records.read()
    assert not records.read()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('"time": 2.0}\n')
    assert records.read()
    assert [line.step for line in records.lines] == [1, 2]


def test_a_run_without_a_step(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.read()
    summary = summarize(records, Status(run="demo"), CONFIG, ["a broken one"], None)
    assert (summary.steps, summary.reward_first5, summary.wall_s, summary.scheduler_share.worker) == (
        0,
        None,
        0,
        None,
    )
    assert dict(summary_lines(summary))["invariants"] == "1 BROKEN: a broken one"
    assert write_summary_plot(records, timeline_of([], CONFIG), summary, tmp_path) is None


def test_written_and_shown(records: Records, tmp_path: Path) -> None:
    summary = summarize(records, STATUS, CONFIG, [], 77)
    path = write_summary(summary, tmp_path)
    assert msgspec.json.decode(path.read_bytes(), type=Summary) == summary
    asked_for = """steps eta max_staleness staleness_histogram reward_first5 reward_last5 ledger
        logprob_abs_diff_mean scheduler_share wall_s wait_s tokens_per_s rss_bytes batches_full verify"""
    assert set(asked_for.split()) <= json.loads(path.read_text()).keys()
    shown = dict(summary_lines(summary))
    assert shown["prompts"] == "27 issued = 24 trained + 2 in slots + 1 dead"
    assert shown["full batches"] == "6 of 6"
    picture = write_summary_plot(records, timeline_of([], CONFIG), summary, tmp_path)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_covered() -> None:
    assert covered([]) == 0
    assert covered([(0, 10), (2, 3), (5, 12), (20, 21)]) == 13


DEEP = b"[" * 100_000 + b"]" * 100_000

JUNK = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"3",
    DEEP,
    b"9" * 5000,
    b"{}",
    b'{"step": null}',
    b'{"step": "one", "time": "one"}',
    b'{"step": -1, "time": -1}',
    b'{"step": 0}',
    b'{"step": 1e300, "time": 1e300}',
    b'{"step": 1, "time": "noon"}',
    b'{"step": 1, "time": NaN, "wall_s": 1}',
    b'{"step": 1, "time": 1, "wall_s": Infinity}',
    b'{"step": 1, "time": 1, "wall_s": {}}',
    b'{"step": 1, "time": 1, "tokens": -5, "groups": -1}',
    b'{"step": 1, "time": 1, "tokens": 1e400, "rss_bytes": 1e400}',
    b'{"step": 1, "staleness/counts": {"a": 1}}',
    b'{"step": 1, "staleness/counts": {"-1": 1}}',
    b'{"step": 1, "staleness/counts": {"999999999": 1}}',
    b'{"step": 1, "staleness/counts": [1]}',
    b'{"step": 1, "reward/mean": Infinity}',
    b'{"step": 1, "reward/mean": "high"}',
    b'{"step": 1, "time/step": -Infinity}',
)


def test_junk_in_the_records(tmp_path: Path) -> None:
    """Junk is skipped; the lines around it are summed up and drawn."""
    good = {
        "metrics.jsonl": b'{"step": 1, "time": 10, "wall_s": 5, "reward/mean": 0.5, "loss": NaN}',
        "workers/w.jsonl": b'{"time": 10, "wall_s": 5, "tokens": 50}',
    }
    for number, junk in enumerate((*((line,) for line in JUNK), JUNK)):
        folder = tmp_path / str(number)
        (folder / "workers").mkdir(parents=True)
        for file, content in good.items():
            (folder / file).write_bytes(b"".join(line + b"\n" for line in (*junk, content)))
        records = Records(folder)
        records.read()
        summary = summarize(records, Status(run="demo", version=1), CONFIG, [], None)
        assert summary.tokens_per_s == 10, junk
        assert summary.reward_first5 == 0.5, junk
        assert dict(summary_lines(summary))["time"] == "5.0 s, 10 tokens/s"
    assert write_summary_plot(records, timeline_of([], CONFIG), summary, folder) is not None
