"""Commands that look at a run as it is: status, buffers, workers, verify."""

from __future__ import annotations

import click
import msgspec

from roq.cli._common import Target, as_json, echo_json, table, target
from roq.display import EMPTY, OCCUPIED, RESERVED, slot_row, trainer_text, worker_info
from roq.summary import clock
from roq.types import Status, WorkerStatus

__all__ = ["COMMANDS"]


@click.command()
@target
@as_json
def status(target: Target, json_: bool) -> None:
    """Show where a run is: steps, buffers, prompts, workers, and what the trainer waits for."""
    with target.scheduler() as scheduler:
        picture = scheduler.status()
        config = scheduler.config()
    if json_:
        echo_json(picture)
        return
    state = "ended" if picture.ended else "paused" if picture.paused else "running"
    total = f" of {config.total_steps}" if config.total_steps else ""
    click.echo(f"run {picture.run}: {state}, step {picture.version}{total}, η = {config.eta}")
    seen = "" if picture.trainer_seen_s is None else f", seen {clock(picture.trainer_seen_s)} ago"
    click.echo(f"trainer: {trainer_text(picture)}{seen}")
    ledger = picture.ledger
    parts = " + ".join(
        f"{getattr(ledger, name)} {name.replace('_', ' ')}"
        for name in ledger.__struct_fields__
        if name != "issued"
    )
    click.echo(f"prompts: {ledger.issued} issued = {parts}")
    click.echo(
        f"work: {picture.inflight} trajectories in flight, {picture.pending} waiting to be issued, "
        f"{picture.payload_bytes / 1e6:.1f} MB of finished data, checkpoint at step {picture.checkpoint}"
    )
    if picture.buffers:
        click.echo()
        _buffers(picture)
    click.echo()
    _workers(picture.workers)
    if picture.waiting:
        click.echo(f"\nunfinished slots of buffer {picture.frontier}:")
        rows = [
            (w.slot, w.group, w.ordinal, clock(w.age_s), ", ".join(w.owners) or "nobody", w.pending)
            for w in picture.waiting
        ]
        table(("slot", "group", "prompt", "age", "held by", "members to issue"), rows, ">>>><>")


@click.command()
@target
@as_json
def buffers(target: Target, json_: bool) -> None:
    """Show the slots of every buffer of the window."""
    with target.scheduler() as scheduler:
        picture = scheduler.status()
    if json_:
        echo_json(picture.buffers)
        return
    _buffers(picture)
    click.echo(f"\n{OCCUPIED} Occupied  {RESERVED} Reserved  {EMPTY} Empty")


def _buffers(picture: Status) -> None:
    rows = [(b.buffer, b.state, b.occupied, b.reserved, b.empty, slot_row(b)) for b in picture.buffers]
    table(("buffer", "state", "occupied", "reserved", "empty", "slots"), rows, "><>>><")


@click.command()
@target
@as_json
def workers(target: Target, json_: bool) -> None:
    """Show every worker: its weights version, its work, its lease, its last error."""
    with target.scheduler() as scheduler:
        found = scheduler.status().workers
    if json_:
        echo_json([msgspec.structs.asdict(worker) | {"info": worker_info(worker)} for worker in found])
        return
    _workers(found)


def _workers(found: list[WorkerStatus]) -> None:
    if not found:
        click.echo("no worker has been seen")
        return
    rows: list[tuple[object, ...]] = []
    for worker in found:
        said = " ".join(f"{key}={value}" for key, value in worker_info(worker).items())
        error = ""
        if worker.error:
            error = f"{worker.error.splitlines()[0][:80]} ({clock(worker.error_age_s or 0.0)} ago)"
        lease = f"{worker.lease_left_s:.0f} s" if worker.lease_left_s > 0 else "expired"
        version = "?" if worker.version is None else worker.version
        rows.append((worker.worker, version, worker.claims, lease, clock(worker.since_s), said, error))
    table(("worker", "version", "claims", "lease", "up", "says", "last error"), rows, "<>>>><<")


@click.command()
@target
@as_json
def verify(target: Target, json_: bool) -> None:
    """Check the protocol's invariants on the live run; exit code 1 if one is broken."""
    with target.scheduler() as scheduler:
        scheduler.config()  # an unknown run is the caller's mistake, not a broken invariant
        problems = scheduler.verify()
    if json_:
        echo_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            click.echo(problem)
        if not problems:
            click.echo("all invariants hold")
    if problems:
        raise SystemExit(1)


COMMANDS = (status, buffers, workers, verify)
