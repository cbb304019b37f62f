"""What the trainer and the workers write into the run's folder, read as it grows.

``metrics.jsonl`` has a line for each step of the trainer, ``workers/*.jsonl`` a line for each worker
about every 5 s. A line that a crash cut short is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

__all__ = ["Records", "Step", "WorkerLine"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``metrics.jsonl``. ``scheduler_s`` and ``wall_s``: seconds since the process began."""

    step: int
    time: float = 0.0
    reward_mean: float | None = field(name="reward/mean", default=None)
    reward_std: float | None = field(name="reward/std", default=None)
    staleness_mean: float = field(name="staleness/mean", default=0.0)
    staleness_max: int = field(name="staleness/max", default=0)
    staleness_counts: dict[str, int] = field(name="staleness/counts", default_factory=dict[str, int])
    groups: int = 0
    trajectories: int = 0
    response_tokens: int = field(name="tokens/response", default=0)
    response_length_mean: float | None = field(name="response_length/mean", default=None)
    loss: float | None = None
    mismatch_kl: float | None = None
    abs_diff_mean: float | None = field(name="mismatch/abs_diff_mean", default=None)
    abs_diff_tokens: int = field(name="mismatch/abs_diff_tokens", default=0)
    wait_s: float = field(name="time/wait_for_batch", default=0.0)
    step_s: float = field(name="time/step", default=0.0)
    scheduler_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0
    replay: bool = False


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``workers/*.jsonl``; its counters (tokens, seconds) count from the process's start."""

    time: float
    worker: str = ""
    version: int | None = None
    wall_s: float = 0.0
    idle_s: float = 0.0
    blocked_s: float = 0.0
    scheduler_s: float = 0.0
    scheduler_under_way_s: float = 0.0
    reserve_wait_s: float = 0.0
    tokens: int = 0
    completed: int = 0
    released: int = 0
    cancelled: int = 0
    failed: int = 0
    swaps: int = 0
    swap_s: float = 0.0
    inflight: int = 0
    rss_bytes: int = 0
    done: bool = False


class Records:
    """All records of a run folder; :meth:`read` takes in what was written since.

    Attributes:
        lines: the trainer's lines in the order written; after a restart steps may come again.
        workers: each worker process's lines, by worker name.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._folder = Path(run_dir)
        self._offsets: dict[Path, int] = {}
        self.lines: list[Step] = []
        self.workers: dict[str, list[WorkerLine]] = {}

    def read(self) -> bool:
        """Read on; says whether the trainer has written something."""
        for path in sorted((self._folder / "workers").glob("*.jsonl")):
            lines = self.workers.setdefault(path.stem, [])
            lines.extend(msgspec.convert(row, WorkerLine, strict=False) for row in self._rows(path, "time"))
        count = len(self.lines)
        self.lines.extend(
            msgspec.convert(row, Step, strict=False)
            for row in self._rows(self._folder / "metrics.jsonl", "step")
        )
        return len(self.lines) > count

    @property
    def steps(self) -> list[Step]:
        """One line for each step, in order; of a step trained again the last line counts."""
        by_step = {line.step: line for line in self.lines}
        return [by_step[number] for number in sorted(by_step)]

    def _rows(self, path: Path, needed: str) -> Iterator[dict[str, Any]]:
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
                row = json.loads(raw)  # not msgspec: a loss may be NaN
            except ValueError:
                continue
            if isinstance(row, dict) and needed in row:
                yield row
