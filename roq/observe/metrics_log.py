"""Read the metrics that the trainer and the workers write to the run's folder, as they grow.

``metrics.jsonl`` has a line for each trainer step, ``workers/*.jsonl`` a line per worker about every 5 s.
Truncated and invalid lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, field

__all__ = ["Records", "Step", "WorkerLine"]

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Real = Annotated[float, Meta(ge=-1e300, le=1e300)]  # finite
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Staleness = Annotated[str, Meta(pattern=r"^\d{1,3}$")]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``metrics.jsonl``.

    Attributes:
        step: the version that the step publishes, from 1.
        scheduler_s, wall_s: totals in seconds since the process started.
    """

    step: Annotated[int, Meta(ge=1, lt=1 << 31)]
    time: Seconds = 0.0
    reward_mean: Real | None = field(name="reward/mean", default=None)
    reward_std: Real | None = field(name="reward/std", default=None)
    staleness_mean: Real = field(name="staleness/mean", default=0.0)
    staleness_max: Count = field(name="staleness/max", default=0)
    staleness_counts: dict[Staleness, Count] = field(name="staleness/counts", default_factory=dict[str, int])
    groups: Count = 0
    trajectories: Count = 0
    response_tokens: Count = field(name="tokens/response", default=0)
    response_length_mean: Real | None = field(name="response_length/mean", default=None)
    loss: float | None = None
    mismatch_kl: float | None = None
    abs_diff_mean: float | None = field(name="mismatch/abs_diff_mean", default=None)
    abs_diff_tokens: Count = field(name="mismatch/abs_diff_tokens", default=0)
    wait_s: Seconds = field(name="time/wait_for_batch", default=0.0)
    step_s: Seconds = field(name="time/step", default=0.0)
    scheduler_s: Seconds = 0.0
    wall_s: Seconds = 0.0
    rss_bytes: Count = 0
    replay: bool = False


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``workers/*.jsonl``; counters (tokens, seconds) are totals since the process started."""

    time: Seconds
    worker: str = ""
    version: Count | None = None
    wall_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    blocked_s: Seconds = 0.0
    scheduler_s: Seconds = 0.0
    scheduler_under_way_s: Seconds = 0.0
    reserve_wait_s: Seconds = 0.0
    tokens: Count = 0
    completed: Count = 0
    released: Count = 0
    cancelled: Count = 0
    failed: Count = 0
    swaps: Count = 0
    swap_s: Seconds = 0.0
    inflight: Count = 0
    rss_bytes: Count = 0
    done: bool = False


Line = TypeVar("Line", Step, WorkerLine)


class Records:
    """All records in a run folder; :meth:`read` adds the lines written since the last call.

    Attributes:
        lines: the trainer's lines in file order; steps can repeat after a restart.
        workers: each worker process's lines, by worker name.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._folder = Path(run_dir)
        self._offsets: dict[Path, int] = {}
        self.lines: list[Step] = []
        self.workers: dict[str, list[WorkerLine]] = {}

    def read(self) -> bool:
        """Read new lines; returns whether the trainer wrote any."""
        for path in sorted((self._folder / "workers").glob("*.jsonl")):
            lines = self.workers.setdefault(path.stem, [])
            lines.extend(self._rows(path, WorkerLine))
        count = len(self.lines)
        self.lines.extend(self._rows(self._folder / "metrics.jsonl", Step))
        return len(self.lines) > count

    @property
    def steps(self) -> list[Step]:
        """One line per step, in order; the last line of a repeated step."""
        by_step = {line.step: line for line in self.lines}
        return [by_step[number] for number in sorted(by_step)]

    def _rows(self, path: Path, kind: type[Line]) -> Iterator[Line]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            return
        complete = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + complete
        for raw in data[:complete].splitlines():
            try:
                yield msgspec.convert(json.loads(raw), kind, strict=False)  # unlike msgspec, json reads NaN
            except (ValueError, RecursionError):
                continue
