"""The command that serves the web dashboard."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

import click

from roq.cli.common import NO_RUN_OR_ARCHIVE, Target, echo, exit_on_sigterm, notice, optional_target
from roq.client.async_scheduler import AsyncScheduler
from roq.errors import ConfigError

__all__ = ["COMMANDS"]


@click.command()
@optional_target
@click.option(
    "--events",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Show an event archive (roq events --archive) instead of the server's stream.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Accept requests for this host name; repeatable. Default: localhost and the --host address.",
)
@click.option(
    "--allow-control",
    is_flag=True,
    help="Allow the page to pause and resume the run, drop groups and drain workers.",
)
def board(
    target: Target | None,
    file: Path | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    allow_control: bool,
) -> None:
    """Serve a web dashboard of a run, live or from an archive.

    Read-only unless --allow-control is given. The page loads nothing from other hosts. It has no login:
    anyone who can reach the address can see the run.
    """
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("the board needs starlette and uvicorn: pip install '.[board]'")
    if target is None and file is None:
        raise ConfigError(NO_RUN_OR_ARCHIVE)
    if allow_control and file is not None:
        raise ConfigError("--allow-control does not work with --events: an archive is read-only")

    from roq.board.app import accepted_hosts, bind, is_loopback, serve
    from roq.board.feed import ArchiveFeed, RunFeed

    hosts = accepted_hosts(host, names)
    # uvicorn shuts down gracefully, then raises the signal again: exit instead, so that cleanup runs
    exit_on_sigterm()
    with bind(host, port) as listener, suppress(KeyboardInterrupt):
        if not is_loopback(host):
            able = "see and control" if allow_control else "see"
            notice(f"warning: anyone who can reach {host} can {able} this run; the board has no login")
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}/"
        if file is not None:
            config = None
            if target is not None:
                with target.scheduler() as scheduler:
                    config = scheduler.config()
            feed = ArchiveFeed(file, config)
            echo(f"board of {feed.run} from {file}: {url}")
            serve(feed, None, listener, hosts=hosts)
            return
        assert target is not None
        with target.scheduler() as scheduler:
            scheduler.config()  # report an unknown run here, not in the browser
            feed = RunFeed(target.url, target.run, control=allow_control)
            steer = AsyncScheduler(target.url, target.run, retry_s=5.0) if allow_control else None
            echo(f"board of run {target.run}: {url}" + " (control allowed)" * allow_control)
            serve(feed, steer, listener, hosts=hosts)


COMMANDS = (board,)
