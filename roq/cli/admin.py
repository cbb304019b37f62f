"""Administration commands: acl, doctor, export, import."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.core import ParameterSource

from roq.admin.acl import acl_file, setuser_commands
from roq.admin.backup import Backup, export_run, import_run, read_header, what_it_runs
from roq.admin.doctor import Finding, examine
from roq.cli.common import (
    Target,
    as_json,
    echo,
    echo_json,
    notice,
    redis_option,
    run_option,
    target,
    wait_option,
)
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
    help="Run that the users can access; repeatable. * matches any text.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(list(ROLES)),
    help="Role to create a user for; repeatable. Default: all except owner.",
)
@click.option(
    "--passwords",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with one password file per role, named ROLE; missing files are created. "
    "Default: no passwords, and no logins until they are set.",
)
@click.option("--prefix", default="roq-", show_default=True, help="User name prefix, before the role.")
@click.option(
    "--file",
    "as_file",
    is_flag=True,
    help="Print lines for the server's aclfile instead of redis-cli commands; disables the user default.",
)
@click.option("--keep-default", is_flag=True, help="With --file: do not change the user default.")
def acl(
    runs: tuple[str, ...],
    roles: tuple[str, ...],
    passwords: Path | None,
    prefix: str,
    as_file: bool,
    keep_default: bool,
) -> None:
    """Print least-privilege ACL users, one per role.

    Load them with `roq acl --run NAME | redis-cli`. A worker cannot publish, the board cannot write, and no
    user can run FLUSHALL, EVAL, CONFIG or KEYS. Passwords are printed as SHA-256 hashes. Regenerate the
    users after upgrading roq.
    """
    chosen = roles or tuple(role for role in ROLES if role != "owner")
    if as_file:
        lines = acl_file(chosen, runs, prefix, passwords, close_default=not keep_default)
    else:
        lines = setuser_commands(chosen, runs, prefix, passwords)
        notice("the user default is unchanged; run ACL SETUSER default off once all clients use these users")
    for line in lines:
        echo(line)


@click.command("export")
@target
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write, such as demo.roq; must not exist.",
)
@as_json
def export_(target: Target, out: Path, json_: bool) -> None:
    """Back up a run to a file, even while it runs.

    The file holds the run's complete state in Redis and can be restored on any server. Weights and
    checkpoints are not included: back up their files too.
    """
    with target.scheduler():
        done = export_run(target.url, target.run, out)
    _tell(done, f"exported to {out}", json_)


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--redis", "url", required=True, envvar="ROQ_REDIS", show_envvar=True, help="URL of the server."
)
@wait_option
@click.option("--yes", is_flag=True, help="Import without asking; needed without a terminal.")
@as_json
def import_(file: Path, url: str, wait: float, yes: bool, json_: bool) -> None:
    """Restore a run from FILE, as written by `roq export`.

    Atomic: either everything is restored or nothing is. Never overwrites an existing run of this name.
    Workers and the trainer continue from the state in the file; a trainer with a newer checkpoint logs a
    warning.

    Import only files that you exported: workers run the functions that the file names, with its engine
    arguments. It prints them and asks first.
    """
    run = read_header(file).run
    _agreed(file, run, yes=yes)
    with Target(url, run, wait).scheduler() as scheduler:
        done = import_run(url, file)
        problems = scheduler.verify()
    _tell(done, f"imported from {file}", json_)
    if problems:
        raise RoqError(f"the imported run violates its invariants: {'; '.join(problems[:5])}")


def on_terminal() -> bool:
    """True if somebody can answer a question."""
    return sys.stdin.isatty()


def _agreed(file: Path, run: str, *, yes: bool) -> None:
    """Unless it was agreed to, show what an import would let workers and the trainer run, and ask.

    Raises:
        ConfigError: nobody said yes.
    """
    if yes:
        return
    notice(f"{file} holds run {run}; its workers and its trainer would use:")
    for name, value in what_it_runs(file).items():
        notice(f"  {name} = {value}")
    if not on_terminal():
        raise ConfigError("nothing was imported: read the settings above, then pass --yes")
    if not click.confirm("Did you or somebody you trust export this file?", err=True):
        raise ConfigError("nothing was imported")


def _tell(done: Backup, what: str, json_: bool) -> None:
    if json_:
        echo_json(done)
        return
    echo(
        f"run {done.run} at step {done.version} {what}: {done.trajectories} trajectories, "
        f"{done.events} events, {size(done.bytes)}"
    )


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@redis_option
@run_option
@as_json
def doctor(config: Path | None, url: str | None, run: str | None, json_: bool) -> None:
    """Check a deployment, before or during a run.

    Checks the server (version, durability, eviction, memory, library, role, clock), the run and its
    processes, and the files visible from this host. ✓ ok, ! warning, ✗ must be fixed (exit code 1).
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
        raise ConfigError("nothing to check: pass a job file, or --redis URL and, for a run, --run NAME")
    findings: list[Finding] = []
    woken = asleep is not None and asleep.start()
    try:
        for finding in examine(url, run, job):
            findings.append(finding)
            if not json_:
                echo(f"{SIGNS[finding.state]} {finding.name:<12} {finding.text}")
    finally:
        if asleep is not None and woken:
            asleep.stop()
    if json_:
        echo_json({"ok": not any(f.state == "failed" for f in findings), "findings": findings})
    if any(finding.state == "failed" for finding in findings):
        raise SystemExit(1)


COMMANDS = (acl, export_, import_, doctor)
