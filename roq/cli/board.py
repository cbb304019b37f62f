"""The command that shows a run as a web page."""

from __future__ import annotations

import importlib.util
import signal
import sys
from contextlib import suppress
from pathlib import Path

import click

from roq.cli.common import Target, notice, optional_target
from roq.client.async_scheduler import AsyncScheduler
from roq.errors import ConfigError

__all__ = ["COMMANDS"]


def _exit(*_signal: object) -> None:
    sys.exit(143)


@click.command()
@optional_target
@click.option(
    "--events",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Show an archive of the events (roq events --archive) instead of the server's stream.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Answer under this host name too (repeatable); the default is localhost and the --host address.",
)
@click.option(
    "--allow-control",
    is_flag=True,
    help="Let the page pause and resume the run, drop groups and drain workers.",
)
def board(
    target: Target | None,
    file: Path | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    allow_control: bool,
) -> None:
    """Show a run as a web page: its buffers as they fill and move, curves, workers; live and again.

    It only looks, unless --allow-control is given. It needs nothing from the network but the run's server.
    The page has no login: whoever reaches the address sees the run.
    """
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("the board needs starlette and uvicorn: pip install '.[board]'")
    if target is None and file is None:
        raise ConfigError("show what? Give a job file, or --redis and --run, or an archive by --events")
    if allow_control and file is not None:
        raise ConfigError("an archive cannot be steered: leave out --allow-control, or --events")

    from roq.board.app import accepted_hosts, bind, is_loopback, serve
    from roq.board.feed import ArchiveFeed, RunFeed

    hosts = accepted_hosts(host, names)
    # uvicorn ends gracefully and then raises the signal again: it must not kill what is still to be put away
    signal.signal(signal.SIGTERM, _exit)
    with bind(host, port) as listener, suppress(KeyboardInterrupt):
        if not is_loopback(host):
            able = "see and steer" if allow_control else "see"
            notice(f"warning: whoever reaches {host} can {able} this run; the board has no login")
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}/"
        if file is not None:
            config = None
            if target is not None:
                with target.scheduler() as scheduler:
                    config = scheduler.config()
            feed = ArchiveFeed(file, config)
            click.echo(f"board of {feed.run} from {file}: {url}")
            serve(feed, None, listener, hosts=hosts)
            return
        assert target is not None
        with target.scheduler() as scheduler:
            scheduler.config()  # an unknown run is told now, not in the browser
            feed = RunFeed(target.url, target.run, control=allow_control)
            steer = AsyncScheduler(target.url, target.run, retry_s=5.0) if allow_control else None
            click.echo(f"board of run {target.run}: {url}" + " (may steer)" * allow_control)
            serve(feed, steer, listener, hosts=hosts)


COMMANDS = (board,)
