"""Commands that show a run's current state: status, buffers, workers, verify, watch."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from roq.cli.common import Target, as_json, echo, echo_json, needs_extra, table, target
from roq.config import RunConfig
from roq.events.event import Event
from roq.observe.words import (
    LEGEND,
    SLOT_COLUMNS,
    failures_text,
    heartbeat,
    heartbeat_age,
    ledger_text,
    published_text,
    run_state,
    shortfall,
    slot_cells,
    slot_row,
    slot_signs,
    step_of,
    tokens_per_s,
    trainer_text,
    worker_doing,
    worker_error,
    worker_figure,
    worker_info,
    worker_version,
)
from roq.text import clock, size
from roq.types import BufferStatus, SlotStatus, Status

__all__ = ["COMMANDS"]

CELLS = 8  # slots per line of `roq buffers`


@click.command()
@target
@as_json
def status(target: Target, json_: bool) -> None:
    """Show a run's progress, trainer, workers, ledger and buffers."""
    with target.scheduler() as scheduler:
        picture = scheduler.status()
        config = scheduler.config()
        step = scheduler.newest_event("publish")
    if json_:
        echo_json(_status_json(picture, config, step))
        return
    first, last = picture.frontier, picture.window_end
    window = f", buffer {first} open" if first == last else f", buffers {first} to {last} open"
    if picture.ended or picture.window_end < picture.frontier:
        window = ""
    at = f"{run_state(picture)}, {step_of(picture.version, config)}"
    echo(f"run {picture.run}: {at}, η = {config.eta}{window}")
    seen = "" if picture.trainer_seen_s is None else f" (last seen {clock(picture.trainer_seen_s)} ago)"
    echo(f"trainer: {trainer_text(picture)}{seen}")
    if step is not None:
        echo(f"last step: {published_text(step)}")
    live = sum(worker.lease_left_s > 0 for worker in picture.workers)
    speed = tokens_per_s(picture.workers)
    echo(f"workers: {live} live, generating {speed:,.0f} tokens/s")
    echo(f"prompts: {ledger_text(picture.ledger)}")
    if failures := failures_text(picture):
        echo(f"failures: {failures}")
    if why := shortfall(picture, config):
        echo(f"stopped: {why}")
    echo(
        f"work: {picture.inflight} trajectories in flight, {picture.pending} waiting to be issued, "
        f"{size(picture.payload_bytes)} of finished data, batches kept since step {picture.checkpoint}"
    )
    if picture.buffers:
        echo()
        rows = [(b.buffer, b.state, b.occupied, b.reserved, b.empty, slot_row(b)) for b in picture.buffers]
        table(("buffer", "state", "occupied", "reserved", "empty", "slots"), rows, "><>>><")
    echo()
    _workers(picture, config)
    if picture.waiting:
        echo()
        echo(f"unfinished slots of buffer {picture.frontier}:")
        rows = [
            (w.slot, w.group, w.ordinal, clock(w.age_s), ", ".join(w.owners) or "none", w.pending)
            for w in picture.waiting
        ]
        table(("slot", "group", "prompt", "age", "held by", "members to issue"), rows, ">>>><>")


def _status_json(picture: Status, config: RunConfig, step: Event | None) -> object:
    last = None if step is None else {"version": step.number("version"), "time": step.time, **step.metrics}
    return {
        **msgspec.structs.asdict(picture),
        "eta": config.eta,
        "total_steps": config.total_steps,
        "tokens_per_s": tokens_per_s(picture.workers),
        "last_step": last,
    }


@click.command()
@target
@click.option(
    "--long", "long_", is_flag=True, help="Print one line per filled slot, with its group's members."
)
@as_json
def buffers(target: Target, long_: bool, json_: bool) -> None:
    """Show every slot in the window, with its group's number."""
    with target.scheduler() as scheduler:
        picture = scheduler.status()
        slots = scheduler.slots()
    if json_:
        own = {b.buffer: [slot for slot in slots if slot.buffer == b.buffer] for b in picture.buffers}
        echo_json([msgspec.structs.asdict(b) | {"slots": own[b.buffer]} for b in picture.buffers])
        return
    if long_:
        rows = [(slot.state, *slot_cells(slot)) for slot in slots]
        table(("state", *SLOT_COLUMNS), rows, "<<>>>>>>><")
        return
    if picture.ended:
        echo("the run has ended; no buffer is open")
        return
    for buffer in picture.buffers:
        _buffer(buffer, slots)
    echo(f"{LEGEND}, and the group's number")


def _buffer(buffer: BufferStatus, slots: Sequence[SlotStatus]) -> None:
    total = buffer.occupied + buffer.reserved + buffer.empty
    counts = f"{buffer.occupied} occupied, {buffer.reserved} reserved, {buffer.empty} empty"
    echo(f"buffer {buffer.buffer}  {buffer.state}  {counts}  {slot_row(buffer)}")
    wide, widest = len(str(total)), max((len(str(slot.group)) for slot in slots), default=1)
    cells = [
        f"{number:>{wide}} {sign} {'' if slot is None else slot.group:<{widest}}"
        for number, (sign, slot) in enumerate(slot_signs(buffer, slots), 1)
    ]
    for start in range(0, total, CELLS):
        echo("   " + "   ".join(cells[start : start + CELLS]).rstrip())
    echo()


@click.command()
@target
@as_json
def workers(target: Target, json_: bool) -> None:
    """Show each worker's version, load, speed and last error."""
    with target.scheduler() as scheduler:
        picture = scheduler.status()
        config = scheduler.config()
    if json_:
        rows = [
            msgspec.structs.asdict(worker)
            | {"info": worker_info(worker), "heartbeat_s": heartbeat_age(worker, config)}
            for worker in picture.workers
        ]
        echo_json(rows)
        return
    _workers(picture, config)


def _workers(picture: Status, config: RunConfig) -> None:
    if not picture.workers:
        echo("no worker is attached")
        return
    sent = any(worker_figure(worker, "received") not in ("-", "0") for worker in picture.workers)
    rows: list[tuple[object, ...]] = []
    for worker in picture.workers:
        speed, done = worker_figure(worker, "tokens_per_s"), worker_figure(worker, "completed")
        row = (worker.worker, worker_version(worker), worker.claims, speed, done, heartbeat(worker, config))
        received = (f"{worker_figure(worker, 'received')}/{worker_figure(worker, 'swaps')}",) if sent else ()
        rows.append((*row, clock(worker.since_s), *received, worker_doing(worker), worker_error(worker)))
    header = ("worker", "version", "in flight", "tokens/s", "done", "heartbeat", "uptime")
    header += (("received",) if sent else ()) + ("activity", "last error")
    table(header, rows, "<>>>>>>" + ">" * sent + "<<")


@click.command()
@target
@as_json
def verify(target: Target, json_: bool) -> None:
    """Check the protocol's invariants on a live run.

    Exits 1 if one is violated.
    """
    with target.scheduler() as scheduler:
        scheduler.config()  # an unknown run is a usage error, not a violated invariant
        problems = scheduler.verify()
    if json_:
        echo_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            echo(problem)
        if not problems:
            echo("all invariants hold")
    if problems:
        raise SystemExit(1)


@click.command()
@target
@click.option(
    "--every",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.1, 60),
    help="Refresh interval in seconds.",
)
def watch(target: Target, every: float) -> None:
    """Watch and control a run in the terminal.

    Pause and resume, drain workers, drop groups; actions that cannot be undone ask for confirmation. Needs
    `pip install '.[watch]'`.
    """
    needs_extra("textual", "watch")
    from roq.observe.watch import Watch

    with target.scheduler() as scheduler:
        config = scheduler.config()
        Watch(target.url, target.run, config, every_s=every).run()


COMMANDS = (status, buffers, workers, verify, watch)
