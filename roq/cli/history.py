"""Commands that look back: events, group, audit."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path

import click
import msgspec

from roq.cli.common import Target, as_json, echo_json, needs_extra, optional_target, table, target
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
from roq.text import clock

__all__ = ["COMMANDS"]

events_file = click.option(
    "--events",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read an archive of the events (roq events --archive) instead of the server's stream.",
)


def _line(event: Event, json: bool) -> str:
    if json:
        return event.line().decode().rstrip("\n")
    if event.name == "archive":
        return f"archive of run {event.get('run')}"
    time = datetime.fromtimestamp(event.time).astimezone()
    return f"{time:%Y-%m-%d %H:%M:%S}.{event.time % 1 * 1000:03.0f}  {event_text(event)}"


@click.command()
@target
@click.option("--follow", "follow_", is_flag=True, help="Go on with those to come, until Ctrl-C.")
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append them to this file, one JSON object a line, instead of printing them.",
)
@click.option("--from", "after", metavar="ID", help="Begin after this id (milliseconds since 1970, or ms-n).")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object a line, as in an archive.")
def events(target: Target, follow_: bool, archive: Path | None, after: str | None, json_: bool) -> None:
    """Print a run's events, oldest first, or archive them.

    The stream on the server keeps the newest `event_log` of them. An archive keeps all: start this with
    --archive and --follow beside a long run. Started again it goes on after the file's last whole line;
    where the stream was trimmed meanwhile, it says so and writes a line with the event `gap`.
    """
    if archive is not None and (after is not None or json_):
        raise ConfigError("--archive goes on where the file ends, in JSON: leave out --from and --json")
    if after is not None and not is_id(after, or_time=True):
        raise ConfigError(f"--from {after[:60]!r} is no id of an event, such as 1796023304207-0")
    with target.scheduler() as scheduler, suppress(KeyboardInterrupt):
        config = scheduler.config()
        with nullcontext() if archive is None else Archive(archive, target.run, config) as kept:
            start = after or (BEGINNING if kept is None else kept.last)
            known = None if kept is None else kept.known
            try:
                for page in follow(scheduler, start, known=known, going=lambda: follow_):
                    for event in page:
                        if kept is None or event.name == "gap":
                            click.echo(_line(event, json_), err=kept is not None)
                    if kept is not None:
                        kept.append(page)
            finally:
                if kept is not None:
                    lost = f"; {kept.missing} more were trimmed before they could be read"
                    click.echo(f"{archive}: {kept.known - kept.missing} events" + lost * bool(kept.missing))


@click.command()
@click.argument("group", type=click.IntRange(min=0))
@optional_target
@events_file
@as_json
def group(target: Target | None, group: int, file: Path | None, json_: bool) -> None:
    """Show all that happened to one group, also after it left the run.

    GROUP is its number, as in `roq status`. What is trimmed from the stream is found in an archive
    (--events) alone.
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
        raise UnknownGroup(
            f"no event tells how group {group} was made: it was never issued, or the stream was trimmed since"
        )
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
    click.echo(f"group {group}: prompt {found.ordinal}, {_fate(found)}")
    for other in others:
        click.echo(f"the same prompt was group {other.group}, {_fate(other)}")
    click.echo()
    rows = [_member_row(number, member) for number, member in sorted(found.members.items())]
    table(("member", "worker", "attempts", "took", "tokens", "reward"), rows, "><>>>>")
    click.echo()
    for event in own:
        click.echo(f"{'+' + clock(event.time - found.reserved):>10}  {event_text(event)}")


def _fate(group: GroupHistory) -> str:
    """Where a group is, or how it left."""
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
    """The events that a command is about, of an archive or of the run; and the run's scheduler, if any."""
    if target is not None:
        with target.scheduler() as scheduler:
            scheduler.config()  # an unknown run has no history
            yield (read_events(scheduler) if file is None else read_archive(file)), scheduler
    elif file is not None:
        yield read_archive(file), None
    else:
        raise ConfigError("of which run? Give a job file, or --redis and --run, or an archive by --events")


@click.command()
@optional_target
@events_file
@as_json
def audit(target: Target | None, file: Path | None, json_: bool) -> None:
    """Replay the events of a run that stands still and prove its ledger; exit code 1 if it cannot be.

    With --events and no run, an archive is proved by itself: each event must follow from those before it.
    """
    if target is not None:
        with target.scheduler() as scheduler:
            scheduler.config()
            found = scheduler.audit(None if file is None else read_archive(file))
    elif file is not None:
        config = archived_config(read_archive(file))
        if config is None:
            raise ConfigError(f"{file} does not begin with the run's configuration; name the run beside it")
        found = audit_events(read_archive(file), config.eta)
    else:
        raise ConfigError("audit what? Give a job file, or --redis and --run, or an archive by --events")
    if json_:
        echo_json(found)
    else:
        _print(found)
    if found.problems:
        raise SystemExit(1)


def _print(found: Audit) -> None:
    fates = " + ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in found.fates.items())
    click.echo(f"{found.events} events: {found.issued} prompts issued = {fates or 0}")
    rows = sorted(found.staleness.items())
    click.echo("groups taken by staleness: " + (", ".join(f"{s}: {n}" for s, n in rows) or "none"))
    click.echo(f"leases: {found.expired} expired, {found.released} released, {found.reissued} issued again")
    for problem in found.problems[:20]:
        click.echo(problem)
    if not found.problems:
        click.echo("every prompt is accounted for once, every group kept its bound")


@click.command()
@optional_target
@events_file
@click.option(
    "--out",
    default=Path("report.html"),
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page; its figures as PNGs go into a folder of the same name.",
)
@as_json
def report(target: Target | None, file: Path | None, out: Path, json_: bool) -> None:
    """Write a page on a run: staleness, reward, waste, who waited for what, and what limits it.

    Needs `pip install '.[local]'`. The page needs no network and no other file. An archive alone
    (--events) is enough; with the run beside it, what its workers wrote on this host is counted too.
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
        click.echo(verdict(timeline))
        click.echo(f"report: {files[0]}")


COMMANDS = (events, group, audit, report)
