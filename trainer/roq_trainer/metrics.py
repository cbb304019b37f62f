"""The line of ``metrics.jsonl`` for each step. A batch trained again after a restart adds a second line."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from roq.types import Batch
from roq_trainer.sums import Sums

__all__ = ["Timer", "append", "published", "step_row", "time_and_memory"]


class Timer:
    """Wall time of the parts of a step, in seconds."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last call to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def step_row(batch: Batch, sums: Sums, grad_norm: float) -> dict[str, Any]:
    """The metrics of one step, without :func:`time_and_memory`.

    Args:
        sums: over the whole batch.
    """

    def mean(total: torch.Tensor) -> float:
        return float(total / sums.tokens)

    members = [member for group in batch.groups for member in group.members]
    rewards = [member.reward for member in members]
    lengths = [member.tokens for member in members]
    stale = [batch.version - member.v_traj for member in members]
    compared = int(sums.abs_diff_tokens)
    return {
        "step": batch.version + 1,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "staleness/mean": statistics.fmean(stale),
        "staleness/max": max(stale),
        "staleness/counts": {str(k): n for k, n in sorted(Counter(stale).items())},
        "groups": len(batch.groups),
        "trajectories": len(members),
        "tokens/response": int(sums.tokens),
        "tokens/prompt": int(sums.prompt_tokens),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "loss": mean(sums.loss),
        "grad_norm": grad_norm,
        "clip_fraction": mean(sums.clipped),
        "mismatch_kl": mean(sums.k3),
        "mismatch/outlier_share": mean(sums.outliers),
        "mismatch/abs_diff_mean": float(sums.abs_diff / compared) if compared else None,
        "mismatch/abs_diff_tokens": compared,
        "importance/mean": mean(sums.importance),
        "importance/truncated_share": mean(sums.truncated),
        "replay": batch.replay,
    }


def time_and_memory(seconds: Mapping[str, float]) -> dict[str, Any]:
    """The time of day, the step's seconds so far, and this process's resident memory.

    ``time/step`` covers everything after taking the batch, including publishing and checkpointing, but not
    ``time/wait_for_batch``.
    """
    return {
        "time": time.time(),
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/step": sum(value for name, value in seconds.items() if name != "wait_for_batch"),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def published(row: Mapping[str, Any]) -> dict[str, float]:
    """The part of a row that is published with the weights, for displays and metrics.

    Later times (``time/export``, ``time/checkpoint``) are only in ``metrics.jsonl``.
    """
    left_out = {"step", "time", "time/step", "rss_bytes", "replay"}
    return {
        name: round(value, 9) if isinstance(value, float) else value
        for name, value in row.items()
        if name not in left_out and isinstance(value, int | float)
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line in one write; readers never see a part of it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
