"""Servers with users of ``roq acl``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roq import Scheduler
from roq.admin.acl import setuser_commands
from roq.protocol.functions import ROLES
from tests.conftest import Server

As = Callable[..., Scheduler]


def make_users(server: Server, folder: Path, *runs: str) -> None:
    """All roles as users of the server; their passwords are in ``folder``."""
    for command in setuser_commands(ROLES, runs or ("test",), "roq-", folder):
        assert server.redis.execute_command(*command.split()) == b"OK"


def url_of(server: Server, folder: Path, role: str) -> str:
    return f"{server.url}?username=roq-{role}&password_file={folder / role}"
