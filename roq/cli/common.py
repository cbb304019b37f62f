"""Helpers shared by all commands: find the run, wait for its server, report errors in one line."""

from __future__ import annotations

import functools
import importlib.util
import logging
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from roq.admin.server import wait_for_server
from roq.client import Scheduler
from roq.config import load_job
from roq.errors import ConfigError, RoqError, UnknownRun
from roq.processes import report_error
from roq.run.embedded_server import EmbeddedServer
from roq.text import printable

__all__ = [
    "NO_RUN_OR_ARCHIVE",
    "Group",
    "Target",
    "as_json",
    "config_argument",
    "echo",
    "echo_json",
    "exit_on_sigterm",
    "needs_extra",
    "notice",
    "optional_target",
    "redis_option",
    "run_option",
    "table",
    "target",
    "wait_option",
]

F = TypeVar("F", bound=Callable[..., Any])

NO_RUN_OR_ARCHIVE = "no run given: pass a job file, --redis and --run, or an archive with --events"


class Group(click.Group):
    """A group that reports every :class:`RoqError` as one line on stderr, with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RoqError as error:
            raise SystemExit(report_error("roq", error)) from None
        except BrokenPipeError:  # stdout was closed: click handles this
            raise
        except OSError as error:  # an unusable path from the user
            unusable = ConfigError(f"{error}; check the path and its permissions")
            raise SystemExit(report_error("roq", unusable)) from None


def echo(text: str = "", *, err: bool = False) -> None:
    """Print one line, without any character that a terminal obeys. Every command prints through here."""
    click.echo(printable(text), err=err)


def notice(text: str) -> None:
    """Print a line on stderr, separate from the command's output."""
    echo(text, err=True)


def needs_extra(package: str, extra: str) -> None:
    """Check that a command's optional package is installed.

    Raises:
        ConfigError: it is not; names the extra to install.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"this command needs {package}: pip install '.[{extra}]'")


config_argument = click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of text.")
redis_option = click.option("--redis", "url", envvar="ROQ_REDIS", show_envvar=True, help="URL of the server.")
run_option = click.option("--run", envvar="ROQ_RUN", show_envvar=True, help="Name of the run.")
wait_option = click.option(
    "--wait", default=60.0, show_default=True, help="Seconds to wait for an unreachable server."
)


def exit_on_sigterm() -> None:
    """Exit with code 143 on SIGTERM, with cleanup as on Ctrl-C."""

    def leave(*_signal: object) -> None:
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


class Target(msgspec.Struct, frozen=True):
    """The run that a command works on: the server's URL and the run's name.

    ``asleep`` is the embedded server of a finished run, started only for this command.
    """

    url: str
    run: str
    wait_s: float
    asleep: EmbeddedServer | None = None

    @contextmanager
    def scheduler(self) -> Generator[Scheduler]:
        """Wait for the server, then return a client for the run."""
        woken = self.asleep is not None and self.asleep.start()
        try:
            wait_for_server(self.url, self.wait_s, notice)
            with Scheduler(self.url, self.run, retry_s=self.wait_s) as scheduler:
                yield scheduler
        finally:
            if self.asleep is not None and woken:
                self.asleep.stop()


def target(command: F) -> F:
    """Add CONFIG, ``--redis``, ``--run`` and ``--wait`` to a command, and pass it the :class:`Target`.

    Options override the job file, which overrides environment variables.
    """
    return _targeted(command, needed=True)


def optional_target(command: F) -> F:
    """Like :func:`target`, but pass None if no run is given."""
    return _targeted(command, needed=False)


def _targeted(command: F, *, needed: bool) -> F:
    @click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
    @redis_option
    @run_option
    @wait_option
    @click.pass_context
    @functools.wraps(command)
    def wrapped(
        ctx: click.Context, config: Path | None, url: str | None, run: str | None, wait: float, **rest: Any
    ) -> Any:
        def option(name: str, value: str | None) -> str | None:
            given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            return value if given or config is None else None

        asked = any(ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE for n in ("url", "run"))
        found = None
        if needed or config or asked or (url and run):  # ROQ_REDIS by itself does not name a run
            found = _find(config, option("url", url), option("run", run), wait)
        return ctx.invoke(command, target=found, **rest)

    return wrapped  # type: ignore[return-value]


def _find(config: Path | None, url: str | None, run: str | None, wait_s: float) -> Target:
    if config is not None:
        job = load_job(config)
        run = run or job.run.name
        if url is None:
            server = EmbeddedServer(job.run.dir)
            url = job.redis.url or server.url
            if job.redis.url is None and not server.alive:
                if not server.folder.exists():
                    raise UnknownRun(f"no run in {job.run.dir} yet; start it with `roq up {config}`")
                return Target(url, run, wait_s, asleep=server)
    if url is None or run is None:
        raise ConfigError(
            "no run given: pass a job file, or --redis URL and --run NAME (or set ROQ_REDIS and ROQ_RUN)"
        )
    return Target(url, run, wait_s)


def echo_json(value: object) -> None:
    """Print a value as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    for line in text.split("\n"):  # the only line breaks: those in strings are escaped already
        echo(line)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> None:
    """Print a table; columns marked with ``>`` in ``right`` are right-aligned."""
    text = [list(header), *[[printable(str(cell)) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    for row in text:
        cells = [
            cell.rjust(width) if right[i : i + 1] == ">" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        echo("  ".join(cells).rstrip())


class EchoLog(logging.Handler):
    """Print roq's log messages as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        notice(record.getMessage())
