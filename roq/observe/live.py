"""The picture of ``roq up`` on a terminal, by rich."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from roq.observe.display import (
    EMPTY,
    OCCUPIED,
    RECENT_ERROR_S,
    RESERVED,
    Display,
    PlainDisplay,
    View,
    rate,
    remaining,
    slot_row,
    sparkline,
    trainer_text,
    worker_doing,
    worker_version,
)
from roq.observe.metrics_log import Step
from roq.text import clock
from roq.types import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LiveDisplay", "make_display", "render"]


def make_display(out: TextIO = sys.stdout) -> Display:
    """The live display if ``out`` is a terminal and rich is installed, else the plain one."""
    if not out.isatty() or importlib.util.find_spec("rich") is None:
        return PlainDisplay(out)
    return LiveDisplay(out)


class LiveDisplay:
    """The whole run at a glance, redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def say(self, text: str) -> None:
        """Print above the picture."""
        self._console.print(text, highlight=False, markup=False)

    def phase(self, text: str) -> None:
        """A spinner with the text, in the picture's place."""
        from rich.spinner import Spinner

        self._live.update(Spinner("dots", text=text))

    def update(self, view: View) -> None:
        """Redraw."""
        self._live.update(render(view, self._console.width))

    def close(self) -> None:
        """Leave the last picture standing."""
        self._live.stop()


def render(view: View, width: int = 100) -> RenderableType:
    """The picture as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel

    status, steps = view.status, view.records.steps
    parts: list[RenderableType] = [_progress(view), ""]
    parts += [*_buffers(status, max(16, min(64, width - 36))), ""] if status.buffers else []
    parts += [*_curves(steps, width), ""] if steps else []
    parts += [_trainer(view), _workers(view)]
    state = "ended" if status.ended else "paused" if status.paused else "running"
    return Panel(
        Group(*parts), title=f"roq · {status.run}", subtitle=state, border_style="dim", padding=(0, 1)
    )


def _progress(view: View) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total, done = view.total_steps, view.status.version
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    left = remaining(view.records.steps, total)
    row.add_row(
        Text(f"step {done}" + (f" of {total}" if total else ""), style="bold"),
        ProgressBar(total=total, completed=done) if total else "",
        f"{clock(left)} left" if left else "",
    )
    return row


_BUFFER_STYLE = {"READY": "bold green", "TRAINING": "bold cyan", "FULL": "bold", "PENDING": "yellow"}


def _buffers(status: Status, width: int) -> Iterable[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for buffer in status.buffers:
        slots = Text()
        for sign in slot_row(buffer, width):
            slots.append(sign, style={OCCUPIED: "green", RESERVED: "yellow"}.get(sign, "dim"))
        table.add_row(
            Text(f"buffer {buffer.buffer}", style="bold"),
            Text(buffer.state, style=_BUFFER_STYLE[buffer.state]),
            slots,
            f"{buffer.occupied}/{buffer.occupied + buffer.reserved + buffer.empty}",
        )
    legend = Text.assemble(
        (OCCUPIED, "green"),
        " Occupied  ",
        (RESERVED, "yellow"),
        " Reserved  ",
        (EMPTY, "dim"),
        " Empty",
        style="dim",
    )
    return [table, legend]


def _curves(steps: Sequence[Step], width: int) -> Iterable[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    last = steps[-1]
    table = Table.grid(padding=(0, 2))
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    wide = max(10, min(60, width - 60))
    if rewards:
        now = f"{rewards[-1]:.3f}  ({min(rewards):.3f} to {max(rewards):.3f})"
        table.add_row("reward", Text(sparkline(rewards, wide), style="green"), now)
    waits = [step.wait_s for step in steps]
    table.add_row(
        "trainer waits",
        Text(sparkline(waits, wide), style="magenta"),
        f"{waits[-1]:.1f} s before the last step",
    )
    stale = [step.staleness_mean for step in steps]
    table.add_row(
        "staleness",
        Text(sparkline(stale, wide), style="blue"),
        f"{last.staleness_mean:.2f}, at most {last.staleness_max}",
    )
    return [table]


def _trainer(view: View) -> RenderableType:
    from rich.text import Text

    state = view.processes.get("trainer", "running")
    text = Text.assemble(("trainer  ", "bold"), trainer_text(view.status))
    return text if state in ("running", "finished") else text.append(f"  (process {state})", style="yellow")


def _workers(view: View) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    now = time.time()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in (
        ("worker", 0),
        ("version", 1),
        ("in flight", 1),
        ("tokens/s", 1),
        ("lease", 1),
        ("", 0),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    total = 0.0
    for worker in view.status.workers:
        speed = rate(view.records.workers.get(worker.worker, ()), now)
        total += speed
        lease = f"{worker.lease_left_s:.0f} s" if worker.lease_left_s > 0 else "expired"
        doing = Text(worker_doing(worker), style="dim")
        if worker.error and (worker.error_age_s or 0.0) < RECENT_ERROR_S:
            doing = Text(worker.error.splitlines()[0][:60], style="red")
        row = (worker.worker, worker_version(worker), str(worker.claims), f"{speed:,.0f}", lease)
        table.add_row(*row, doing)
    if len(view.status.workers) > 1:
        table.add_row("all", "", str(view.status.inflight), f"{total:,.0f}", "", "", style="dim")
    for name, state in view.processes.items():
        if state == "running" and not view.status.workers:
            state = "starts: the engine loads the model"
        if name != "trainer" and state not in ("running", "finished"):
            table.add_row(name, "", "", "", "", Text(state, style="yellow"))
    return table if table.row_count else ""
