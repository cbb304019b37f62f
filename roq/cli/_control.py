"""Commands that steer a run: pause, resume, drop; and library."""

from __future__ import annotations

import click

from roq import _library
from roq.cli._common import Target, as_json, echo_json, target

__all__ = ["COMMANDS"]


@click.command()
@target
@as_json
def pause(target: Target, json_: bool) -> None:
    """Admit no new prompts; what is admitted goes on."""
    _admission(target, json_, paused=True)


@click.command()
@target
@as_json
def resume(target: Target, json_: bool) -> None:
    """Admit new prompts again."""
    _admission(target, json_, paused=False)


def _admission(target: Target, json_: bool, *, paused: bool) -> None:
    with target.scheduler() as scheduler:
        if paused:
            scheduler.pause()
        else:
            scheduler.resume()
    if json_:
        echo_json({"run": target.run, "paused": paused})
    else:
        click.echo(f"run {target.run} " + ("admits no new prompts" if paused else "admits prompts"))


@click.command()
@target
@click.option(
    "--group", type=click.IntRange(min=0), required=True, help="The group's number, as in roq status."
)
@click.option("--reason", default="by hand", show_default=True, help="Kept in the run's events.")
@as_json
def drop(target: Target, group: int, reason: str, json_: bool) -> None:
    """Take an unfinished group out of the run; its prompt is requeued or discarded as configured."""
    with target.scheduler() as scheduler:
        removal = scheduler.drop(group, reason)
    if json_:
        echo_json({"group": group, "status": removal.status})
    else:
        click.echo(f"group {group} dropped; its prompt is {removal.status}")


@click.command()
def library() -> None:
    """Print the Lua library, for `roq library | redis-cli -x FUNCTION LOAD REPLACE`."""
    click.echo(_library.source(), nl=False)


COMMANDS = (pause, resume, drop, library)
