"""Commands that start and stop: up, down, init."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from roq.admin.server import check_server, masked, wait_for_server
from roq.cli.common import EchoLog, as_json, config_argument, echo_json, notice
from roq.client import Scheduler
from roq.config import load_job
from roq.errors import ConfigError
from roq.job.checks import check_job
from roq.job.prompts import load_prompts
from roq.job.stored import create_run
from roq.job.tokens import check_prompts_here
from roq.observe.display import Display
from roq.observe.summary import summary_lines
from roq.run.up import down as stop_everything
from roq.run.up import up as run_up

__all__ = ["COMMANDS"]


@click.command()
@config_argument
@as_json
def up(config: Path, json_: bool) -> None:
    """Run the job of CONFIG on this machine to its end.

    Starts a server (unless the file names one), the workers and the trainer, shows progress, and writes
    summary.json and summary.png. All of them are detached: kill this command and they go on; run it
    again and it attaches to them. Ctrl-C stops everything so that it can be continued later.
    """
    log = logging.getLogger("roq")
    for handler in [handler for handler in log.handlers if isinstance(handler, EchoLog)]:
        log.removeHandler(handler)  # the display tells it in its own way
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
        return
    click.echo()
    for name, value in summary_lines(summary):
        click.echo(f"{name:<22}{value}")
    click.echo(f"{'summary':<22}{Path(load_job(config).run.dir) / 'summary.json'}")


@click.command()
@config_argument
def down(config: Path) -> None:
    """Stop what `roq up CONFIG` started on this machine; `roq up` continues later."""
    stop_everything(load_job(config), click.echo)


@click.command()
@config_argument
@click.option("--redis", "url", envvar="ROQ_REDIS", show_envvar=True, help="URL of the server.")
@click.option("--wait", default=60.0, show_default=True, help="Seconds to wait for a server that is away.")
@as_json
def init(config: Path, url: str | None, wait: float, json_: bool) -> None:
    """Create the run of CONFIG on a server; then start workers and a trainer anywhere.

    Creating a run again with the same job changes nothing.
    """
    job = load_job(config)
    url = url or job.redis.url
    if url is None:
        raise ConfigError(
            f"{config} names no server: give --redis URL, or write url in [redis]; "
            "only `roq up` brings a server of its own"
        )
    check_job(job, config, engines_here=False)
    prompts = load_prompts(job.data)
    check_prompts_here(job, prompts, notice)
    wait_for_server(url, wait, notice)
    warnings = check_server(url)
    with Scheduler(url, job.run.name, retry_s=wait) as scheduler:
        new = create_run(scheduler, job, prompts)
    for warning in warnings:
        notice(f"warning: {warning}")
    if json_:
        echo_json({"run": job.run.name, "created": new, "prompts": len(prompts), "warnings": warnings})
        return
    click.echo(
        f"run {job.run.name} {'created' if new else 'exists already, with this job'}: {len(prompts)} prompts"
    )
    here = f"--redis {masked(url)} --run {job.run.name}"
    click.echo(f"start workers with: python -m roq_worker {here}")
    click.echo(f"and the trainer with: python -m roq_trainer {here}")


COMMANDS = (up, down, init)
