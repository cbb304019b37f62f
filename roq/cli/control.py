"""Commands that control a run: pause, resume, drop, filter, reject, drain, dead; and library."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC

import click

from roq.cli.common import Target, as_json, echo, echo_json, table, target
from roq.errors import Invalid, NotReady
from roq.protocol import library
from roq.text import moment

__all__ = ["COMMANDS"]


which = click.option(
    "--group", type=click.IntRange(min=0), required=True, help="Group number, as shown by roq status."
)
because = click.option(
    "--reason", default="by hand", show_default=True, help="Reason to record in the run's events."
)


@click.command()
@target
@because
@as_json
def pause(target: Target, reason: str, json_: bool) -> None:
    """Stop admitting new prompts; work in flight continues."""
    _admission(target, reason, json_, paused=True)


@click.command()
@target
@because
@as_json
def resume(target: Target, reason: str, json_: bool) -> None:
    """Resume admitting new prompts."""
    _admission(target, reason, json_, paused=False)


def _tell(done: dict[str, object], sentence: str, json_: bool) -> None:
    if json_:
        echo_json(done)
    else:
        echo(sentence)


def _admission(target: Target, reason: str, json_: bool, *, paused: bool) -> None:
    with target.scheduler() as scheduler:
        if paused:
            scheduler.pause(reason)
        else:
            scheduler.resume(reason)
    what = "paused: it admits no new prompts" if paused else "resumed"
    _tell({"run": target.run, "paused": paused}, f"run {target.run} is {what}", json_)


@click.command()
@target
@which
@because
@as_json
def drop(target: Target, group: int, reason: str, json_: bool) -> None:
    """Drop an unfinished group.

    Its prompt is requeued or discarded, as configured.
    """
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
    """Filter a finished group before it is trained."""
    with target.scheduler() as scheduler:
        removal = scheduler.filter(group, reason)
    _tell({"group": group, "status": removal.status}, f"group {group} is {removal.status}", json_)


@click.command()
@target
@which
@because
@as_json
def reject(target: Target, group: int, reason: str, json_: bool) -> None:
    """Reject a finished group that cannot be trained.

    Works on the batch in training too: another group takes its place, and the trainer takes the batch
    again. A trainer that is working on it stops and must be restarted (roq up does so).
    """
    with target.scheduler() as scheduler:
        removal = scheduler.reject(group, reason)
    sentence = f"group {group} rejected; its prompt is {removal.status}"
    _tell({"group": group, "status": removal.status}, sentence, json_)


@click.command()
@target
@click.option("--worker", required=True, help="Worker name, as shown by roq workers.")
@because
@as_json
def drain(target: Target, worker: str, reason: str, json_: bool) -> None:
    """Drain a worker: it finishes its work and exits.

    It takes no new work and exits with code 0.
    """
    with target.scheduler() as scheduler:
        claims = scheduler.drain(worker, reason)
    sentence = f"worker {worker} leaves when its {claims} trajectories are done"
    _tell({"worker": worker, "claims": claims}, sentence, json_)


@click.command()
@target
@click.option("--revive", multiple=True, type=click.IntRange(min=0), help="Requeue this prompt; repeatable.")
@click.option("--revive-all", is_flag=True, help="Requeue all of them.")
@because
@as_json
def dead(target: Target, revive: tuple[int, ...], revive_all: bool, reason: str, json_: bool) -> None:
    """List dead letters, or revive them.

    A dead letter is a prompt that used up its attempts.
    """
    with target.scheduler() as scheduler:
        letters = scheduler.dead()
        known = {letter.ordinal for letter in letters}
        if unknown := [ordinal for ordinal in revive if ordinal not in known]:
            raise Invalid(f"not dead letters: {', '.join(map(str, unknown))}; nothing was revived")
        chosen: list[int] = []
        for ordinal in sorted(known) if revive_all else sorted(set(revive)):
            with suppress(NotReady):  # already revived by someone else
                scheduler.revive(ordinal, reason)
                chosen.append(ordinal)
    if json_:
        echo_json({"dead": letters, "revived": chosen})
    elif chosen:
        echo(f"revived prompts: {len(chosen)}; they are issued before any new one")
    elif not letters:
        echo("no dead letters")
    else:
        table(
            ("prompt", "drops", "attempts", "since", "reason"),
            ((x.ordinal, x.drops, x.attempt, _when(x.at), x.reason) for x in letters),
            right=">>>",
        )


def _when(milliseconds: int) -> str:
    return f"{moment(milliseconds / 1000, UTC)} UTC"


@click.command("library")
def print_library() -> None:
    """Print the Lua library.

    Load it with `roq library | redis-cli -x FUNCTION LOAD REPLACE`.
    """
    click.echo(library.source(), nl=False)


COMMANDS = (pause, resume, drop, filter_, reject, drain, dead, print_library)
