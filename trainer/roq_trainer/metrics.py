"""One line of ``metrics.jsonl`` for each step. A batch trained again after a restart gives a second line."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from roq.types import Batch
from roq_trainer.loss import MISMATCH
from roq_trainer.step import STATS

__all__ = ["SUMS", "Laps", "append", "figures", "line", "spent"]

SUMS = (*MISMATCH, *STATS, "prompt_tokens")
"""The sums over the whole batch that :func:`line` needs, in order."""


class Laps:
    """Wall time of the parts of a step, in seconds."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Book the time since the last call under ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def line(batch: Batch, sums: Sequence[float], grad_norm: float) -> dict[str, Any]:
    """The figures of one step, but for :func:`spent`; all means over tokens are over the whole batch."""
    total = dict(zip(SUMS, sums, strict=True))
    members = [member for group in batch.groups for member in group.members]
    rewards = [member.reward for member in members]
    lengths = [member.tokens for member in members]
    stale = [batch.version - member.v_traj for member in members]
    tokens, current = total["tokens"], total["abs_diff_tokens"]
    return {
        "step": batch.version + 1,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "staleness/mean": statistics.fmean(stale),
        "staleness/max": max(stale),
        "staleness/counts": {str(k): n for k, n in sorted(Counter(stale).items())},
        "groups": len(batch.groups),
        "trajectories": len(members),
        "tokens/response": int(tokens),
        "tokens/prompt": int(total["prompt_tokens"]),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "loss": total["loss"] / tokens,
        "grad_norm": grad_norm,
        "clip_fraction": total["clipped"] / tokens,
        "mismatch_kl": total["k3"] / tokens,
        "mismatch/outlier_share": total["outliers"] / tokens,
        "mismatch/abs_diff_mean": total["abs_diff"] / current if current else None,
        "mismatch/abs_diff_tokens": int(current),
        "importance/mean": total["importance"] / tokens,
        "importance/truncated_share": total["truncated"] / tokens,
        "replay": batch.replay,
    }


def spent(seconds: Mapping[str, float]) -> dict[str, Any]:
    """When it is, what a step has taken so far and how much memory there is in use.

    ``time/step`` is everything from having the batch to having its weights published and, where due, its
    checkpoint written: ``time/wait_for_batch`` is not part of it.
    """
    return {
        "time": time.time(),
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/step": sum(value for name, value in seconds.items() if name != "wait_for_batch"),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The part of a line that goes with the published version to everybody who looks at the run.

    The times that are not known yet (``time/export``, ``time/checkpoint``) are in ``metrics.jsonl`` alone.
    """
    left_out = {"step", "time", "time/step", "rss_bytes", "replay"}
    return {
        name: round(value, 9) if isinstance(value, float) else value
        for name, value in row.items()
        if name not in left_out and isinstance(value, int | float)
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line; written in one piece, so a reader sees it whole."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
