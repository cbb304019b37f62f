"""A worker's counters, and the lines it writes to ``workers/{worker}.jsonl`` in the run's folder."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from roq.client.async_scheduler import AsyncScheduler
from roq.errors import ConfigError
from roq.processes import make_run_folder
from roq_worker.engine import Engine

__all__ = ["Counters", "Log", "Rate", "resident_bytes"]


@dataclass
class Counters:
    """Cumulative counters since the start of the rollout loop.

    Attributes:
        completed: trajectories handed in.
        post_processed: groups post-processed.
        released: claims released unfinished when leaving.
        cancelled: attempts cancelled by the scheduler.
        fenced: attempts finished or failed after another worker got the claim.
        failed: attempts failed by a reward function or the engine.
        swaps, swap_s: weight swaps, and the seconds without generation during them.
        received: swaps with weights sent by the trainer.
        idle_s: seconds without work for the engine.
        blocked_s: seconds with free capacity that the scheduler refused to fill.
        reserve_wait_s: seconds waiting for ``reserve`` with free capacity. Handing in results does not
            block generation; ``scheduler_s`` in the log counts both.
    """

    completed: int = 0
    post_processed: int = 0
    released: int = 0
    cancelled: int = 0
    fenced: int = 0
    failed: int = 0
    swaps: int = 0
    swap_s: float = 0.0
    received: int = 0
    idle_s: float = 0.0
    blocked_s: float = 0.0
    reserve_wait_s: float = 0.0

    def shown(self) -> dict[str, float]:
        """All counters by name, seconds rounded to the millisecond."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


class Log:
    """Append lines of JSON; a write error is reported once, and the worker continues."""

    def __init__(self, folder: Path, worker: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._path = folder / "workers" / f"{worker}.jsonl"
        self._worker = worker
        self._say = say
        self._began = time.monotonic()
        self._failed = False

    def write(
        self,
        counters: Counters,
        engine: Engine,
        scheduler: AsyncScheduler,
        *,
        inflight: int,
        done: bool = False,
    ) -> None:
        """Append one line: the counters of worker, engine and client, and the current state."""
        line = {
            "time": time.time(),
            "worker": self._worker,
            "version": engine.version,
            "wall_s": time.monotonic() - self._began,
            "wait_s": counters.idle_s + counters.blocked_s,
            **asdict(counters),
            "tokens": engine.tokens,
            "inflight": inflight,
            "scheduler_calls": scheduler.stats.calls,
            "scheduler_s": scheduler.stats.seconds,
            "scheduler_under_way_s": scheduler.stats.under_way_s,
            "rss_bytes": resident_bytes(),
            "done": done,
        }
        try:
            make_run_folder(self._folder)
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except (OSError, ConfigError) as error:
            if not self._failed:
                self._say(f"cannot write metrics, continuing without: {error}")
            self._failed = True


@dataclass
class Rate:
    """The rate of a cumulative count over the last ``over_s`` seconds."""

    over_s: float = 10.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, count: int) -> float:
        """Add the current count; returns its increase per second."""
        now = time.monotonic()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self.over_s:
            self._seen.popleft()
        (since, before) = self._seen[0]
        return (count - before) / (now - since) if now > since else 0.0


def resident_bytes() -> int:
    """Resident memory in bytes of this process and its descendants (engine and reward processes).

    Shared pages, such as torch's libraries, are counted once (PSS, where the system reports it).
    """
    total = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
        except psutil.Error:  # the process has ended
            continue
    return total
