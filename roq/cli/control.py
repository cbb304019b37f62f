"""Commands that steer a run: pause, resume, drop, filter, drain, dead; and library."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import click

from roq.cli.common import Target, as_json, echo_json, table, target
from roq.errors import Invalid, NotReady
from roq.protocol import library

__all__ = ["COMMANDS"]


which = click.option(
    "--group", type=click.IntRange(min=0), required=True, help="The group's number, as in roq status."
)
because = click.option("--reason", default="by hand", show_default=True, help="Kept in the run's events.")


@click.command()
@target
@because
@as_json
def pause(target: Target, reason: str, json_: bool) -> None:
    """Admit no new prompts; what is admitted goes on."""
    _admission(target, reason, json_, paused=True)


@click.command()
@target
@because
@as_json
def resume(target: Target, reason: str, json_: bool) -> None:
    """Admit new prompts again."""
    _admission(target, reason, json_, paused=False)


def _tell(done: dict[str, object], sentence: str, json_: bool) -> None:
    if json_:
        echo_json(done)
    else:
        click.echo(sentence)


def _admission(target: Target, reason: str, json_: bool, *, paused: bool) -> None:
    with target.scheduler() as scheduler:
        if paused:
            scheduler.pause(reason)
        else:
            scheduler.resume(reason)
    what = "admits no new prompts" if paused else "admits prompts"
    _tell({"run": target.run, "paused": paused}, f"run {target.run} {what}", json_)


@click.command()
@target
@which
@because
@as_json
def drop(target: Target, group: int, reason: str, json_: bool) -> None:
    """Take an unfinished group out of the run; its prompt is requeued or discarded as configured."""
    with target.scheduler() as scheduler:
        removal = scheduler.drop(group, reason)
    sentence = f"group {group} dropped; its prompt is {removal.status}"
    _tell({"group": group, "status": removal.status}, sentence, json_)


@click.command("filter")
@target
@which
@because
@as_json
def filter_(target: Target, group: int, reason: str, json_: bool) -> None:
    """Take a finished group out of the run before it is trained."""
    with target.scheduler() as scheduler:
        removal = scheduler.filter(group, reason)
    _tell({"group": group, "status": removal.status}, f"group {group} is {removal.status}", json_)


@click.command()
@target
@click.option("--worker", required=True, help="The worker's name, as in roq workers.")
@because
@as_json
def drain(target: Target, worker: str, reason: str, json_: bool) -> None:
    """Ask a worker to go: it gets no more work, ends what it has, and leaves with exit code 0."""
    with target.scheduler() as scheduler:
        claims = scheduler.drain(worker, reason)
    sentence = f"worker {worker} leaves when its {claims} trajectories are done"
    _tell({"worker": worker, "claims": claims}, sentence, json_)


@click.command()
@target
@click.option("--revive", multiple=True, type=click.IntRange(min=0), help="Put this prompt back.")
@click.option("--revive-all", is_flag=True, help="Put all of them back.")
@because
@as_json
def dead(target: Target, revive: tuple[int, ...], revive_all: bool, reason: str, json_: bool) -> None:
    """List dead letters (prompts that failed too often); --revive puts them back."""
    with target.scheduler() as scheduler:
        letters = scheduler.dead()
        known = {letter.ordinal for letter in letters}
        if unknown := [ordinal for ordinal in revive if ordinal not in known]:
            raise Invalid(f"not dead letters: {', '.join(map(str, unknown))}; nothing was put back")
        chosen: list[int] = []
        for ordinal in sorted(known) if revive_all else sorted(set(revive)):
            with suppress(NotReady):  # somebody else has put it back meanwhile
                scheduler.revive(ordinal, reason)
                chosen.append(ordinal)
    if json_:
        echo_json({"dead": letters, "revived": chosen})
    elif chosen:
        click.echo(f"{len(chosen)} prompts are put back; they are issued before any new one")
    elif not letters:
        click.echo("no dead letters")
    else:
        table(
            ("prompt", "drops", "attempts", "buried at", "reason"),
            ((x.ordinal, x.drops, x.attempt, _when(x.at), x.reason) for x in letters),
            right=">>>",
        )


def _when(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%F %T} UTC"


@click.command("library")
def print_library() -> None:
    """Print the Lua library, for `roq library | redis-cli -x FUNCTION LOAD REPLACE`."""
    click.echo(library.source(), nl=False)


COMMANDS = (pause, resume, drop, filter_, drain, dead, print_library)
