"""The metrics of each step in TensorBoard and Weights & Biases, where the job enables them.

``metrics.jsonl`` is the authoritative record. A logger that fails is reported once and dropped; training
continues.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from roq.config import Job
from roq.observe.words import worker_info
from roq.types import Status

__all__ = ["NAMES", "Logs", "shares"]

log = logging.getLogger("roq.trainer")

# Names of metrics.jsonl -> names in prime-rl or, where it has none, in verl. All others (time/step,
# time/wait_for_batch and those that only roq has) stay the same.
NAMES = {
    "reward/mean": "reward/all/mean",
    "staleness/mean": "off_policy_level/all/mean",
    "staleness/max": "off_policy_level/all/max",
    "mismatch_kl": "mismatch_kl/all/mean",
    "loss": "loss/mean",
    "grad_norm": "optim/grad_norm",
    "time/export": "time/broadcast_weights",
    "time/checkpoint": "time/save_ckpt",
    "clip_fraction": "actor/pg_clipfrac",
}


class Writer(Protocol):
    """A logger of scalars."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Logs:
    """A job's loggers, on rank 0.

    Args:
        job: names the loggers. version: of the current weights; logged later steps are replaced.
    """

    def __init__(self, job: Job, version: int) -> None:
        self._writers: dict[str, Writer] = {}
        folder = Path(job.run.dir)
        if job.logging.tensorboard:
            self._open("TensorBoard", lambda: TensorBoard(folder, version))
        if job.logging.wandb is not None:
            self._open("Weights & Biases", lambda: WeightsAndBiases(job, folder))

    def write(self, row: Mapping[str, Any], status: Callable[[], Status]) -> None:
        """Log one step.

        Args:
            row: its line of ``metrics.jsonl``.
            status: returns the run's status, for the totals of prompts and workers.
        """
        if not self._writers:
            return
        scalars = {NAMES.get(name, name): value for name, value in row.items() if _is_scalar(name, value)}
        scalars |= shares(status())
        for name, writer in list(self._writers.items()):
            self._try(name, lambda writer=writer: writer.write(row["step"], scalars))

    def close(self) -> None:
        """Write out what is left."""
        for name, writer in list(self._writers.items()):
            self._try(name, writer.close)

    def _open(self, name: str, make: Callable[[], Writer]) -> None:
        self._try(name, lambda: self._writers.update({name: make()}))

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a logger does, training continues
            self._writers.pop(name, None)
            log.warning("%s fails, continuing without it: %s: %s", name, type(error).__name__, error)


def shares(status: Status) -> dict[str, float]:
    """Outcomes of prompts and attempts so far, and the time lost by the current workers.

    Shares of prompts are of those issued, shares of rollouts of the attempts ended by the current workers.
    """
    issued, ledger = max(1, status.ledger.issued), status.ledger
    infos = [worker_info(worker) for worker in status.workers]

    def total(name: str) -> float:
        values = [info.get(name) for info in infos]
        return float(sum(value for value in values if isinstance(value, int | float)))

    ended = sum(total(name) for name in ("completed", "cancelled", "failed", "fenced", "released"))
    return {
        "prompts/filtered_share": ledger.filtered / issued,
        "prompts/discarded_share": ledger.discarded / issued,
        "prompts/dead": float(ledger.dead),
        "rollouts/cancelled_share": total("cancelled") / max(1.0, ended),
        "rollouts/failed_share": total("failed") / max(1.0, ended),
        "workers/idle_s": total("idle_s"),
        "workers/blocked_s": total("blocked_s"),
        "workers/swap_s": total("swap_s"),
    }


def _is_scalar(name: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "time")


class TensorBoard:
    """Event files in ``tensorboard/``; after a restart, steps after ``version`` are replaced."""

    def __init__(self, folder: Path, version: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=version + 1 if version else None)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per roq run: a restarted trainer resumes it.

    The axis is a metric named ``step``, since W&B's built-in step cannot go back when a batch is trained
    again.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        import wandb

        asked = job.logging.wandb
        assert asked is not None
        name = folder / "wandb-run-id"
        if not name.exists():
            name.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=asked.project,
            entity=asked.entity,
            group=asked.group,
            name=asked.name or job.run.name,
            tags=asked.tags,
            id=name.read_text().strip(),
            resume="allow" if asked.mode == "online" else None,
            mode=asked.mode,
            dir=folder,
            config=msgspec.to_builtins(job),
            settings=wandb.Settings(console="off", silent=True, init_timeout=60),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step."""
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        """Wait until everything is written or sent."""
        self._run.finish()
