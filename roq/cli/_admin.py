"""Commands for who runs the server: acl."""

from __future__ import annotations

from pathlib import Path

import click

from roq.acl import ROLES, acl_file, setuser_commands
from roq.cli._common import notice

__all__ = ["COMMANDS"]


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
    help="Only this role; may be given again.",
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
    chosen = roles or tuple(ROLES)
    if as_file:
        lines = acl_file(chosen, runs, prefix, passwords, close_default=not keep_default)
    else:
        lines = setuser_commands(chosen, runs, prefix, passwords)
        notice("the user default stays as it is: once all use these users, run ACL SETUSER default off")
    for line in lines:
        click.echo(line)


COMMANDS = (acl,)
