"""What ``roq up`` shows while it runs: a live picture on a terminal, one plain line per step elsewhere.

The pieces of text (a buffer's slots, what the trainer does) are those of ``roq status`` and ``roq buffers``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TextIO

import click
import msgspec

from roq.config import RunConfig
from roq.events.event import Event
from roq.observe.metrics_log import Records, Step, WorkerLine
from roq.text import clock
from roq.types import BufferStatus, Status, WorkerStatus

__all__ = [
    "EMPTY",
    "OCCUPIED",
    "RECENT_ERROR_S",
    "RESERVED",
    "Display",
    "PlainDisplay",
    "View",
    "event_text",
    "heartbeat_age",
    "last_step_text",
    "rate",
    "remaining",
    "slot_row",
    "sparkline",
    "step_line",
    "tokens_per_s",
    "trainer_text",
    "worker_doing",
    "worker_figure",
    "worker_info",
    "worker_version",
]

OCCUPIED, RESERVED, EMPTY = "■", "▨", "·"
SILENCE_S = 20.0  # the plain display says what is waited for after so long without a line
RECENT_ERROR_S = 60.0  # a worker's error stands in place of what it does for so long
RATE_WINDOW_S = 15.0  # tokens per second are those of the last so many seconds


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to show: the scheduler's picture, the records, and the state of each process."""

    config: RunConfig
    status: Status
    records: Records
    processes: Mapping[str, str]

    @property
    def total_steps(self) -> int | None:
        """Steps that the run has in all; None for an endless one."""
        config = self.config
        if config.prompts is None or config.epochs is None:
            return config.total_steps
        supply = config.prompts * config.epochs // config.batch_size
        return supply if config.total_steps is None else min(supply, config.total_steps)


class Display(Protocol):
    """Where the supervisor shows what happens."""

    def say(self, text: str) -> None:
        """Something happened that stays readable afterwards."""
        ...

    def phase(self, text: str) -> None:
        """What start-up is busy with."""
        ...

    def update(self, view: View) -> None:
        """The run as it is now."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


# ---- pieces of text ------------------------------------------------------------------------------


def slot_row(buffer: BufferStatus, width: int = 64) -> str:
    """The buffer's slots in order, one sign each, or in proportion where there are more than ``width``.

    >>> slot_row(BufferStatus(buffer=3, occupied=2, reserved=1, empty=1, state="PENDING"))
    '■■·▨'
    """
    occupied, empty, reserved = buffer.occupied, buffer.empty, buffer.reserved
    total = occupied + empty + reserved
    if total > width:
        occupied, reserved = _shrink(occupied, total, width), _shrink(reserved, total, width)
        empty = max(0, width - occupied - reserved)
    return OCCUPIED * occupied + EMPTY * empty + RESERVED * reserved


def _shrink(part: int, total: int, width: int) -> int:
    """A part's share of ``width``; never nothing for something, so that one open slot of 4,096 is seen."""
    return max(1, part * width // total) if part else 0


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text, the mean of neighbours where there are more values than ``width``.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    if not values:
        return ""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return "▄" * len(values)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / (high - low) * 7)] for value in values)


def trainer_text(status: Status) -> str:
    """What the trainer does, or what it waits for: which slots, whose, and for how long."""
    if status.ended:
        return "the run has ended"
    if status.training is not None:
        return f"trains batch {status.training}"
    first = next((buffer for buffer in status.buffers if buffer.buffer == status.frontier), None)
    if first is None:
        return f"waits for batch {status.frontier}: nothing is reserved for it yet"
    if first.state == "READY":
        return f"batch {first.buffer} is READY" + ("" if status.trainer else "; no trainer has come yet")
    text = f"waits for batch {first.buffer}: "
    text += f"{first.occupied} complete, {first.reserved} in work, {first.empty} empty"
    if status.waiting:
        oldest = max(status.waiting, key=lambda slot: slot.age_s)
        whose = f"with {', '.join(oldest.owners)}" if oldest.owners else "with no worker"
        text += f"; oldest: slot {oldest.slot}, {whose} for {clock(oldest.age_s)}"
    return text


def worker_info(worker: WorkerStatus) -> dict[str, object]:
    """What the worker says of itself."""
    try:
        return msgspec.json.decode(worker.info, type=dict[str, object]) if worker.info else {}
    except msgspec.DecodeError:
        return {"text": worker.info}


def worker_figure(worker: WorkerStatus, name: str) -> str:
    """What the worker says of itself under a name; "-" where it says nothing, as one's own client may."""
    return str(worker_info(worker).get(name, "-"))


def worker_version(worker: WorkerStatus) -> str:
    """The weights version that it has loaded; "-" before it says."""
    return "-" if worker.version is None else str(worker.version)


def worker_doing(worker: WorkerStatus) -> str:
    """What the worker is at, in a few words."""
    return "draining" if worker.draining else str(worker_info(worker).get("doing", ""))


def heartbeat_age(worker: WorkerStatus, config: RunConfig) -> float:
    """Seconds since a worker was last heard of; a lease begins anew with everything it says."""
    return max(0.0, config.lease_s - worker.lease_left_s)


def tokens_per_s(workers: Iterable[WorkerStatus]) -> float:
    """What the live workers say they generate, together."""
    live = [worker_info(worker).get("tokens_per_s") for worker in workers if worker.lease_left_s > 0]
    return float(sum(speed for speed in live if isinstance(speed, int | float)))


def event_text(event: Event) -> str:
    """An event as a line for people, without its time.

    >>> event_text(Event("5-0", {"event": "occupy", "group": "3", "at": "0.2", "moves": "7:0.3>1.1"}))
    'occupy          group 3, at 0.2, moves 7:0.3>1.1'
    """
    if event.name == "gap":
        missing = event.get("missing", "an unknown number of")
        return f"gap             {missing} events were trimmed from the stream before they were read"
    fields = ", ".join(f"{name} {value}" for name, value in event.fields.items() if name != "event")
    return f"{event.name:<15} {fields}".rstrip()


def last_step_text(step: Event) -> str:
    """The figures that the trainer published with a version, in one line."""
    figures = step.metrics
    named = (
        ("reward/mean", "reward {:.3f}"),
        ("staleness/mean", "staleness {:.2f}"),
        ("staleness/max", "at most {:.0f}"),
        ("mismatch_kl", "mismatch KL {:.1e}"),
        ("tokens/response", "{:,.0f} tokens"),
        ("time/wait_for_batch", "waited {:.1f} s"),
    )
    parts = [form.format(figures[name]) for name, form in named if name in figures]
    return f"v{step.number('version')} published" + "".join(f", {part}" for part in parts)


def step_line(step: Step, total: int | None, left_s: float | None) -> str:
    """One step as one line."""
    reward = "?" if step.reward_mean is None else f"{step.reward_mean:.3f}"
    parts = [
        f"step {step.step}" + (f"/{total}" if total else ""),
        f"reward {reward}",
        f"staleness {step.staleness_mean:.2f} (max {step.staleness_max})",
        f"{step.response_tokens:,} tokens",
        f"{step.step_s:.1f} s",
        f"waited {step.wait_s:.1f} s",
    ]
    if step.replay:
        parts.append("again after a restart")
    if left_s:
        parts.append(f"{clock(left_s)} left")
    return "  ".join(parts)


def remaining(steps: Sequence[Step], total: int | None) -> float | None:
    """Seconds left at the pace of the last ten steps; None when that cannot be told."""
    recent = steps[-11:]
    if total is None or len(recent) < 2 or recent[-1].step <= recent[0].step:
        return None
    pace = (recent[-1].time - recent[0].time) / (recent[-1].step - recent[0].step)
    return max(0.0, pace * (total - recent[-1].step))


def rate(lines: Sequence[WorkerLine], now: float) -> float:
    """Tokens per second of one worker of late; 0 when it has written nothing for a while."""
    recent = [line for line in lines[-8:] if line.time > now - RATE_WINDOW_S]
    if not recent or recent[-1].done:
        return 0.0
    first = recent[0] if len(recent) > 1 else None
    tokens = recent[-1].tokens - (first.tokens if first else 0)
    seconds = recent[-1].time - first.time if first else recent[-1].wall_s
    return tokens / seconds if seconds > 0 else 0.0


# ---- displays ------------------------------------------------------------------------------------


class PlainDisplay:
    """One line for each step and each event; for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown: int | None = None
        self._said_at = time.monotonic()

    def say(self, text: str) -> None:
        """Print the line."""
        self._said_at = time.monotonic()
        click.echo(text, file=self._out)

    phase = say

    def update(self, view: View) -> None:
        """Print the steps that are new since the first call, or after a long silence what is waited for."""
        lines = view.records.lines
        if self._shown is None:
            self._shown = len(lines)
            if view.status.version:
                self.say(f"goes on after step {view.status.version}")
        for number in range(self._shown, len(lines)):
            left = remaining(view.records.steps, view.total_steps) if number == len(lines) - 1 else None
            self.say(step_line(lines[number], view.total_steps, left))
        self._shown = len(lines)
        if time.monotonic() - self._said_at > SILENCE_S:
            attached = view.status.workers
            doing = {worker_doing(worker) for worker in attached} - {""}
            workers = ", ".join(sorted(doing)) or (f"{len(attached)} attached" if attached else "starting")
            self.say(f"trainer {trainer_text(view.status)}; workers: {workers}")

    def close(self) -> None:
        """Nothing to undo."""
