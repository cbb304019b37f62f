"""The command line: ``roq COMMAND``.

Exit codes: 0 success; 1 failure, or a check found a problem; 2 invalid input, nothing was changed;
130 and 143 ``roq up`` was stopped by SIGINT or SIGTERM.
"""

from __future__ import annotations

import logging

import click

from roq.cli import admin, board, control, history, look, metrics, run, sim
from roq.cli.common import EchoLog, Group

__all__ = ["main"]


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="roq", message="%(version)s")
def main() -> None:
    """Schedule asynchronous RL post-training inside Redis.

    Commands identify a run by its job file (CONFIG), or by --redis and --run.
    """
    log = logging.getLogger("roq")
    if not any(isinstance(handler, EchoLog) for handler in log.handlers):
        log.addHandler(EchoLog())


for module in (run, look, history, board, metrics, control, admin, sim):
    for command in module.COMMANDS:
        main.add_command(command)
