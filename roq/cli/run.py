"""Commands that create, start and stop a run: up, down, init."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click
import msgspec

from roq.admin.server import check_server, masked, wait_for_server
from roq.cli.common import (
    EchoLog,
    as_json,
    config_argument,
    echo,
    echo_json,
    notice,
    redis_option,
    wait_option,
)
from roq.client import Scheduler
from roq.config import load_job
from roq.errors import ConfigError, RunIncomplete
from roq.job.checks import check_job, check_supply
from roq.job.prompts import load_prompts
from roq.job.stored import create_run
from roq.job.tokens import check_prompts_here
from roq.observe.display import Display
from roq.observe.summary import Summary, summary_lines
from roq.run.up import down as stop_everything
from roq.run.up import up as run_up
from roq.weights import is_url

__all__ = ["COMMANDS"]


@click.command()
@config_argument
@as_json
def up(config: Path, json_: bool) -> None:
    """Run a job on this machine until it ends.

    Starts a server (unless CONFIG names one), the workers and the trainer, shows progress, and writes
    summary.json and summary.png. The processes are detached: they continue if this command is killed, and
    running it again attaches to them. Ctrl-C stops everything; run it again to resume.
    """
    log = logging.getLogger("roq")
    for handler in [handler for handler in log.handlers if isinstance(handler, EchoLog)]:
        log.removeHandler(handler)  # the display reports these itself
    log.addHandler(logging.NullHandler())
    display = Display(sys.stderr if json_ else sys.stdout)
    try:
        summary, stopped_by = run_up(config, display)
    finally:
        display.close()
    if summary is None:
        raise SystemExit(128 + stopped_by)
    if json_:
        echo_json(summary)
    else:
        _show(summary, Path(load_job(config).run.dir))
    if summary.shortfall:
        raise RunIncomplete(summary.shortfall)


def _show(summary: Summary, folder: Path) -> None:
    echo()
    for name, value in summary_lines(summary):
        echo(f"{name:<22}{value}")
    echo(f"{'summary':<22}{folder / 'summary.json'}")


@click.command()
@config_argument
def down(config: Path) -> None:
    """Stop the processes that `roq up` started on this machine.

    Run `roq up CONFIG` to resume.
    """
    stop_everything(load_job(config), echo)


@click.command()
@config_argument
@redis_option
@click.option("--weights", metavar="PATH", help="Location of the weights if the job does not name one.")
@wait_option
@as_json
def init(config: Path, url: str | None, weights: str | None, wait: float, json_: bool) -> None:
    """Create a run on a server, without starting processes.

    Then start workers and a trainer on any host. Creating a run again with the same job changes nothing.
    """
    job = load_job(config)
    if weights is not None and job.run.weights is None:
        place = weights if is_url(weights) else str(Path(weights).absolute())
        job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, weights=place))
    url = url or job.redis.url
    if url is None:
        raise ConfigError(
            f"{config} does not name a server: pass --redis URL, or set url in [redis]; "
            "only `roq up` starts its own server"
        )
    check_job(job, config, engines_here=False)
    prompts = load_prompts(job.data)
    check_prompts_here(job, prompts, notice)
    short = check_supply(job.protocol, len(prompts))
    wait_for_server(url, wait, notice)
    warnings = [*([short] if short else []), *check_server(url)]
    with Scheduler(url, job.run.name, retry_s=wait) as scheduler:
        new = create_run(scheduler, job, prompts, notice)
    for warning in warnings:
        notice(f"warning: {warning}")
    if json_:
        echo_json({"run": job.run.name, "created": new, "prompts": len(prompts), "warnings": warnings})
        return
    echo(f"run {job.run.name} {'created' if new else 'already exists with this job'}: {len(prompts)} prompts")
    here = f"--redis {masked(url)} --run {job.run.name}"
    echo(f"start workers with: python -m roq_worker {here}")
    echo(f"and the trainer with: python -m roq_trainer {here}")


COMMANDS = (up, down, init)
