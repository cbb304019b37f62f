"""Commands that look back: events, group, audit."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path

import click

from roq.audit import Audit, audit_archive
from roq.cli._common import Target, as_json, echo_json, optional_target, target
from roq.errors import ConfigError
from roq.history import BEGINNING, Archive, Event, archived_config, follow, read_archive

__all__ = ["COMMANDS", "event_text"]

events_file = click.option(
    "--events",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read an archive of the events (roq events --archive) instead of the server's stream.",
)


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
    if after is not None and not all(part.isdecimal() for part in after.split("-", 1)):
        raise ConfigError(f"--from {after!r} is no id of an event, such as 1796023304207-0")
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
        found = audit_archive((event.fields for event in read_archive(file)), config.eta)
    else:
        raise ConfigError("audit what? Give a job file, or --redis and --run, or an archive by --events")
    if json_:
        echo_json(found)
    else:
        _say(found)
    if found.problems:
        raise SystemExit(1)


def _say(found: Audit) -> None:
    fates = " + ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in found.fates.items())
    click.echo(f"{found.events} events: {found.issued} prompts issued = {fates or 0}")
    rows = sorted(found.staleness.items())
    click.echo("groups trained by staleness: " + (", ".join(f"{s}: {n}" for s, n in rows) or "none"))
    click.echo(f"leases: {found.expired} expired, {found.released} released, {found.reissued} issued again")
    for problem in found.problems[:20]:
        click.echo(problem)
    if not found.problems:
        click.echo("every prompt is accounted for once, every group kept its bound")


COMMANDS = (events, audit)
