"""The output of ``roq up``: one line per step and event, and on a terminal a status line below them."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

import click
import msgspec

from roq.config import RunConfig
from roq.observe.metrics_log import Records
from roq.observe.words import (
    failures_text,
    ledger_text,
    remaining,
    step_line,
    step_of,
    total_steps,
    trainer_text,
    worker_doing,
)
from roq.text import printable
from roq.types import Status

__all__ = ["Display", "View"]

SILENCE_S = 20.0  # without a terminal, print the status after this long without a line


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The data to display: the run's configuration and status, and its processes' records."""

    config: RunConfig
    status: Status
    records: Records


class Display:
    """Print progress to ``out``; on a terminal, the status line is rewritten in place."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._live = out, out.isatty()
        self._shown: int | None = None
        self._said_at = time.monotonic()
        self._failed, self._failed_at = 0, self._said_at

    def say(self, text: str) -> None:
        """Print a line."""
        self._said_at = time.monotonic()
        self.close()
        click.echo(printable(text), file=self._out)

    def update(self, view: View) -> None:
        """Print steps added since the previous call, then the status."""
        lines, total = view.records.lines, total_steps(view.config)
        if self._shown is None:
            self._shown = len(lines)
            if view.status.version:
                self.say(f"resuming after step {view.status.version}")
        for number in range(self._shown, len(lines)):
            left = remaining(view.records.steps, total) if number == len(lines) - 1 else None
            self.say(step_line(lines[number], total, left))
        self._shown = len(lines)
        self._failures(view.status)
        if self._live:
            text = printable(f"{step_of(view.status.version, view.config)}: {_status_text(view.status)}")
            click.echo(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", file=self._out, nl=False)
        elif time.monotonic() - self._said_at > SILENCE_S:
            self.say(_status_text(view.status))

    def _failures(self, status: Status) -> None:
        """Report failed attempts: the first, each doubling, and at intervals while they continue."""
        new, now = status.failed - self._failed, time.monotonic()
        if new > 0 and (new >= self._failed or now - self._failed_at > SILENCE_S):
            self._failed, self._failed_at = status.failed, now
            dead = f"`roq dead` lists the {status.ledger.dead} prompts given up" if status.ledger.dead else ""
            self.say(f"{failures_text(status)}; {dead or '`roq dead` lists prompts that fail too often'}")

    def close(self) -> None:
        """Clear the status line."""
        if self._live:
            click.echo("\r\033[K", file=self._out, nl=False)


def _status_text(status: Status) -> str:
    doing = {worker_doing(worker) for worker in status.workers} - {""}
    count = len(status.workers)
    workers = ", ".join(sorted(doing)) or (f"{count} attached" if count else "starting")
    lost = status.ledger.dead + status.ledger.filtered + status.ledger.discarded
    counts = f"; prompts: {ledger_text(status.ledger)}" if lost else ""
    return f"trainer {trainer_text(status)}; workers: {workers}{counts}"
