"""Commands for who runs the server: acl, doctor, export, import."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from roq.admin.acl import acl_file, setuser_commands
from roq.admin.backup import Backup, export_run, import_run, read_header
from roq.admin.doctor import Finding, examine
from roq.cli.common import Target, as_json, echo_json, notice, target
from roq.config import load_job
from roq.errors import ConfigError, RoqError
from roq.protocol.functions import ROLES
from roq.run.embedded_server import EmbeddedServer
from roq.text import size

__all__ = ["COMMANDS"]

SIGNS = {"ok": "✓", "warning": "!", "failed": "✗"}


@click.command()
@click.option(
    "--run",
    "runs",
    multiple=True,
    required=True,
    help="A run that the users are for; may be given again. * in it stands for any text.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(list(ROLES)),
    help="Only this role; may be given again. Without it: all but owner.",
)
@click.option(
    "--passwords",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with a file ROLE for each role's password; missing ones are made. "
    "Without it nobody can log in until a password is set.",
)
@click.option("--prefix", default="roq-", show_default=True, help="Put before the role in a user's name.")
@click.option(
    "--file",
    "as_file",
    is_flag=True,
    help="Lines for the server's aclfile, not commands for redis-cli; they switch the user default off.",
)
@click.option("--keep-default", is_flag=True, help="With --file: leave the user default out of it.")
def acl(
    runs: tuple[str, ...],
    roles: tuple[str, ...],
    passwords: Path | None,
    prefix: str,
    as_file: bool,
    keep_default: bool,
) -> None:
    """Print users with the least rights that each role needs: `roq acl --run NAME | redis-cli`.

    A worker cannot publish, the board cannot write, nobody can FLUSHALL, EVAL, CONFIG or KEYS. Passwords are
    printed as SHA-256 only. Make the rules anew when roq is upgraded.
    """
    chosen = roles or tuple(role for role in ROLES if role != "owner")
    if as_file:
        lines = acl_file(chosen, runs, prefix, passwords, close_default=not keep_default)
    else:
        lines = setuser_commands(chosen, runs, prefix, passwords)
        notice("the user default stays as it is: once all use these users, run ACL SETUSER default off")
    for line in lines:
        click.echo(line)


@click.command("export")
@target
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file to write, such as demo.roq; it must not exist.",
)
@as_json
def export_(target: Target, out: Path, json_: bool) -> None:
    """Back a run up into one file; the run may go on meanwhile.

    The file holds all that Redis has of the run, in a form that any server takes. Weights and checkpoints
    are files already: back them up beside it.
    """
    with target.scheduler():
        done = export_run(target.url, target.run, out)
    _tell(done, f"exported to {out}", json_)


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--redis", "url", required=True, envvar="ROQ_REDIS", show_envvar=True, help="URL of the server."
)
@click.option("--wait", default=60.0, show_default=True, help="Seconds to wait for a server that is away.")
@as_json
def import_(file: Path, url: str, wait: float, json_: bool) -> None:
    """Restore a run from FILE, as roq export wrote it, under its own name. All of it, or nothing.

    A run of this name that is there already is never touched. Workers and the trainer go on from where the
    file was written; a trainer whose checkpoint is newer is told so.
    """
    run = read_header(file).run
    with Target(url, run, wait).scheduler() as scheduler:
        done = import_run(url, file)
        problems = scheduler.verify()
    _tell(done, f"imported from {file}", json_)
    if problems:
        raise RoqError(f"the run as imported breaks its invariants: {'; '.join(problems[:5])}")


def _tell(done: Backup, what: str, json_: bool) -> None:
    if json_:
        echo_json(done)
        return
    click.echo(
        f"run {done.run} at step {done.version} {what}: {done.trajectories} trajectories, "
        f"{done.events} events, {size(done.bytes)}"
    )


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--redis", "url", envvar="ROQ_REDIS", show_envvar=True, help="URL of the server.")
@click.option("--run", envvar="ROQ_RUN", show_envvar=True, help="Name of the run.")
@as_json
def doctor(config: Path | None, url: str | None, run: str | None, json_: bool) -> None:
    """Check a deployment, before a run or while it goes on; exit code 1 if something must be mended.

    Looks at the server (version, durability, eviction, memory, library, our role, clock), at the run and its
    processes, and at the files that this host sees. ✓ good, ! mind it, ✗ mend it.
    """

    def given(name: str) -> bool:
        return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE

    job, asleep = None, None
    if config is not None:
        job = load_job(config)
        run = run if given("run") else job.run.name
        if not given("url"):
            url, server = job.redis.url, EmbeddedServer(job.run.dir)
            if url is None and server.folder.exists():
                url, asleep = server.url, server
    elif url is None:
        raise ConfigError("check what? Give a job file, or --redis URL and, for a run, --run NAME")
    findings: list[Finding] = []
    woken = asleep is not None and asleep.start()
    try:
        for finding in examine(url, run, job):
            findings.append(finding)
            if not json_:
                click.echo(f"{SIGNS[finding.state]} {finding.name:<12} {finding.text}")
    finally:
        if asleep is not None and woken:
            asleep.stop()
    if json_:
        echo_json({"ok": not any(f.state == "failed" for f in findings), "findings": findings})
    if any(finding.state == "failed" for finding in findings):
        raise SystemExit(1)


COMMANDS = (acl, export_, import_, doctor)
