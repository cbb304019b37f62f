"""History commands: events, group, audit, report."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import click
import msgspec

from roq.cli.common import (
    NO_RUN_OR_ARCHIVE,
    Target,
    as_json,
    echo,
    echo_json,
    needs_extra,
    optional_target,
    table,
    target,
)
from roq.client import Scheduler
from roq.errors import ConfigError, UnknownGroup
from roq.events.archive import Archive, archived_config, read_archive
from roq.events.audit import Audit, audit_events
from roq.events.event import BEGINNING, Event
from roq.events.fields import is_id
from roq.events.follow import follow, read_events
from roq.events.history import GroupHistory, MemberHistory, groups_of
from roq.events.replay import Replay
from roq.observe.words import event_text
from roq.text import clock, moment

__all__ = ["COMMANDS"]

events_file = click.option(
    "--events",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read an event archive (roq events --archive) instead of the server's stream.",
)


def _line(event: Event, json: bool) -> str:
    if json:
        return event.line().decode().rstrip("\n")
    if event.name == "archive":
        return f"archive of run {event.get('run')}"
    return f"{moment(event.time)}.{event.time % 1 * 1000:03.0f}  {event_text(event)}"


@click.command()
@target
@click.option("--follow", "follow_", is_flag=True, help="Wait for new events until Ctrl-C.")
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append events to this file, one JSON object per line, instead of printing them.",
)
@click.option("--from", "after", metavar="ID", help="Start after this id (milliseconds since 1970, or ms-n).")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object per line, as in an archive.")
def events(target: Target, follow_: bool, archive: Path | None, after: str | None, json_: bool) -> None:
    """Print a run's events, oldest first, or archive them.

    The server keeps only the newest `event_log` events. To keep all events of a long run, run this with
    --archive and --follow alongside it. A restart continues after the file's last complete line; if events
    were trimmed in between, it reports that and writes a `gap` event.
    """
    if archive is not None and (after is not None or json_):
        raise ConfigError("--archive always continues the file, in JSON: omit --from and --json")
    if after is not None and not is_id(after, or_time=True):
        raise ConfigError(f"--from {after[:60]!r} is not an event id such as 1796023304207-0")
    with target.scheduler() as scheduler, suppress(KeyboardInterrupt):
        config = scheduler.config()
        with nullcontext() if archive is None else Archive(archive, target.run, config) as kept:
            start = after or (BEGINNING if kept is None else kept.last)
            known = None if kept is None else kept.known
            try:
                for page in follow(scheduler, start, known=known, going=lambda: follow_):
                    for event in page:
                        if kept is None or event.name == "gap":
                            echo(_line(event, json_), err=kept is not None)
                    if kept is not None:
                        kept.append(page)
            finally:
                if kept is not None:
                    lost = f"; {kept.missing} more were trimmed before they were read"
                    echo(f"{archive}: {kept.known - kept.missing} events" + lost * bool(kept.missing))


@click.command()
@click.argument("group", type=click.IntRange(min=0))
@optional_target
@events_file
@as_json
def group(target: Target | None, group: int, file: Path | None, json_: bool) -> None:
    """Show the full history of a group.

    GROUP is its number, as shown by `roq status`; it may have left the run. Events trimmed from the stream
    are only in an archive (--events).
    """
    with _history(target, file) as (history, _):
        replay, own, found = Replay(), list[Event](), None
        for event in history:
            before = None if found is None else found.state
            replay.apply(event)
            found = replay.groups.get(group)
            if group in groups_of(event) or (found is not None and found.state != before):
                own.append(event)
    if found is None:
        raise UnknownGroup(f"no event creates group {group}: it was never issued, or the event was trimmed")
    others = [g for g in replay.groups.values() if g.ordinal == found.ordinal and g.group != group]
    if json_:
        echo_json(
            {
                **msgspec.structs.asdict(found),
                "staleness": found.staleness,
                "place": None if found.place is None else str(found.place),
                "same_prompt": [g.group for g in others],
                "events": [{"id": event.id, **event.fields} for event in own],
            }
        )
        return
    echo(f"group {group}: prompt {found.ordinal}, {_fate(found)}")
    for other in others:
        echo(f"the same prompt was group {other.group}, {_fate(other)}")
    echo()
    rows = [_member_row(number, member) for number, member in sorted(found.members.items())]
    table(("member", "worker", "attempts", "took", "tokens", "reward"), rows, "><>>>>")
    echo()
    for event in own:
        echo(f"{'+' + clock(event.time - found.reserved):>10}  {event_text(event)}")


def _fate(group: GroupHistory) -> str:
    """Describe where a group is, or how it left."""
    if group.batch is not None:
        return f"{group.state} in batch {group.batch} with staleness {group.staleness}"
    if group.place is not None:
        return f"{group.state} at {group.place}, v_traj {group.v_traj}"
    return f"{group.state}" + f" ({group.reason})" * bool(group.reason)


def _member_row(number: int, member: MemberHistory) -> tuple[object, ...]:
    took = "cancelled" if member.cancelled else "" if member.issued is None else "running"
    if member.issued is not None and member.completed is not None:
        took = clock(member.completed - member.issued)
    reward = "" if member.reward is None else f"{member.reward:g}"
    worker = member.worker or "waits to be issued"
    return number or "post-processing", worker, member.attempts, took, member.tokens or "", reward


@contextmanager
def _history(target: Target | None, file: Path | None) -> Generator[tuple[Iterator[Event], Scheduler | None]]:
    """Open the run's or the archive's events; also returns the run's scheduler, if any."""
    if target is not None:
        with target.scheduler() as scheduler:
            scheduler.config()  # fail now if the run is unknown
            yield (read_events(scheduler) if file is None else read_archive(file)), scheduler
    elif file is not None:
        yield read_archive(file), None
    else:
        raise ConfigError(NO_RUN_OR_ARCHIVE)


@click.command()
@optional_target
@events_file
@as_json
def audit(target: Target | None, file: Path | None, json_: bool) -> None:
    """Replay an idle run's events and check its ledger.

    Every prompt must be accounted for; exits 1 on a discrepancy. With only --events, the archive is checked
    for consistency.
    """
    with _history(target, file) as (history, scheduler):
        if scheduler is not None:
            found = scheduler.audit(None if file is None else history)
        elif (config := archived_config(history)) is not None:
            found = audit_events(history, config.eta)
        else:
            raise ConfigError(f"{file} does not start with a configuration; also pass --redis and --run")
    if json_:
        echo_json(found)
    else:
        _print(found)
    if found.problems:
        raise SystemExit(1)


def _print(found: Audit) -> None:
    fates = " + ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in found.fates.items())
    echo(f"{found.events} events: {found.issued} prompts issued = {fates or 0}")
    rows = sorted(found.staleness.items())
    echo("groups taken by staleness: " + (", ".join(f"{s}: {n}" for s, n in rows) or "none"))
    echo(f"leases: {found.expired} expired, {found.released} released, {found.reissued} issued again")
    for name, count in found.unknown.items():
        echo(f"unknown to this version: {name}, {count} times")
    for problem in found.problems[:20]:
        echo(problem)
    if not found.problems:
        echo("every prompt is accounted for once; every trained group is within the staleness bound")


@click.command()
@optional_target
@events_file
@click.option(
    "--out",
    default=Path("report.html"),
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Page to write; its plots are also written as PNGs, to a folder of the same name.",
)
@as_json
def report(target: Target | None, file: Path | None, out: Path, json_: bool) -> None:
    """Write an HTML report that names the run's bottleneck.

    It shows staleness, reward, wasted tokens and waiting times, in one self-contained file. Needs `pip
    install '.[local]'`. An archive (--events) is enough; if the run is given too, the report includes the
    metrics that its workers wrote on this host.
    """
    needs_extra("matplotlib", "local")
    from roq.observe.metrics_log import Records
    from roq.observe.report import write_report
    from roq.observe.timeline import timeline_of, verdict

    with _history(target, file) as (history, scheduler):
        config, folder = None, None
        if scheduler is not None:
            config, folder = scheduler.config(), scheduler.settings().get("run.dir")
        timeline = timeline_of(history, config, "" if target is None else target.run)
    if folder is not None:
        records = Records(msgspec.json.decode(folder, type=str))
        records.read()
        last = [lines[-1].tokens for lines in records.workers.values() if lines]
        timeline.generated = sum(last) if last else None
    files = write_report(timeline, out)
    if json_:
        echo_json({"files": [str(path) for path in files], "verdict": verdict(timeline)})
    else:
        echo(verdict(timeline))
        echo(f"report: {files[0]}")


COMMANDS = (events, group, audit, report)
