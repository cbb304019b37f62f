"""What a worker counts, and the lines it writes to ``workers/{worker}.jsonl`` in the run's folder."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from roq.client.async_scheduler import AsyncScheduler
from roq_worker.engine import Engine

__all__ = ["Counters", "Log", "Rate", "resident_bytes"]


@dataclass
class Counters:
    """Counted since the worker's loop began; all only rise.

    Attributes:
        completed: trajectories handed in.
        post_processed: groups post-processed.
        released: handed back unfinished at a detach.
        cancelled: stopped because the scheduler said so.
        fenced: finished or failed too late, when another worker had the claim.
        failed: attempts that a reward function or the engine failed.
        swaps, swap_s: weights loaded while running, and the seconds without generation for it.
        received: of these, the ones that the trainer sent.
        idle_s: the engine had nothing to do.
        blocked_s: there were free places, and the scheduler refused to fill them.
        reserve_wait_s: the loop waited for an answer with free places in the engine. Results are handed
            in beside generation and hold nothing up; ``scheduler_s`` in the log counts them too.
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
        """All of them as status and metrics show them, seconds to the millisecond."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


class Log:
    """Appends lines of JSON; a disk that refuses them is reported once and costs nothing else."""

    def __init__(self, folder: Path, worker: str, say: Callable[[str], None]) -> None:
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
        """One line: all counters, what the engine and the client count, and how things stand now."""
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
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._failed:
                self._say(f"metrics cannot be written, going on without: {error}")
            self._failed = True


@dataclass
class Rate:
    """A rate over the last ``over_s`` seconds of a count that only rises."""

    over_s: float = 10.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, count: int) -> float:
        """Take in the count of now; returns its rise per second."""
        now = time.monotonic()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self.over_s:
            self._seen.popleft()
        (since, before) = self._seen[0]
        return (count - before) / (now - since) if now > since else 0.0


def resident_bytes() -> int:
    """Resident memory of this process and all its descendants (engine and reward processes).

    Pages that they share, such as torch's libraries, are counted once (PSS, where the system tells it).
    """
    total = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
        except psutil.Error:  # it ended meanwhile
            continue
    return total
