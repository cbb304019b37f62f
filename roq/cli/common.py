"""What all commands share: finding the run, waiting for its server, errors as one plain line."""

from __future__ import annotations

import functools
import importlib.util
import logging
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

__all__ = [
    "Group",
    "Target",
    "as_json",
    "config_argument",
    "echo_json",
    "needs_extra",
    "notice",
    "optional_target",
    "table",
    "target",
]

F = TypeVar("F", bound=Callable[..., Any])


class Group(click.Group):
    """Turns every :class:`RoqError` into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RoqError as error:
            raise SystemExit(report_error("roq", error)) from None
        except BrokenPipeError:  # the reader of our output has gone: click knows what to do
            raise
        except OSError as error:  # a path of the user's that cannot be
            unusable = ConfigError(f"{error}; check the path and its permissions")
            raise SystemExit(report_error("roq", unusable)) from None


def notice(text: str) -> None:
    """A line for the person at the terminal, beside the output proper."""
    click.echo(text, err=True)


def needs_extra(package: str, extra: str) -> None:
    """Refuse a command whose optional package is not installed.

    Raises:
        ConfigError: names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"this command needs {package}: pip install '.[{extra}]'")


config_argument = click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of text.")


class Target(msgspec.Struct, frozen=True):
    """The run that a command is about: the server's URL and the run's name.

    ``asleep`` is the embedded server of a run that is over: it is woken for the command alone.
    """

    url: str
    run: str
    wait_s: float
    asleep: EmbeddedServer | None = None

    @contextmanager
    def scheduler(self) -> Generator[Scheduler]:
        """A client for the run, once its server answers."""
        woken = self.asleep is not None and self.asleep.start()
        try:
            wait_for_server(self.url, self.wait_s, notice)
            with Scheduler(self.url, self.run, retry_s=self.wait_s) as scheduler:
                yield scheduler
        finally:
            if self.asleep is not None and woken:
                self.asleep.stop()


def target(command: F) -> F:
    """Give a command CONFIG, ``--redis`` and ``--run``, and pass it the :class:`Target` they name.

    Options outrank the file, the file outranks the environment.
    """
    return _targeted(command, needed=True)


def optional_target(command: F) -> F:
    """As :func:`target`, for a command that can do without a run: it is passed None when none is named."""
    return _targeted(command, needed=False)


def _targeted(command: F, *, needed: bool) -> F:
    @click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
    @click.option("--redis", "url", envvar="ROQ_REDIS", show_envvar=True, help="URL of the server.")
    @click.option("--run", envvar="ROQ_RUN", show_envvar=True, help="Name of the run.")
    @click.option(
        "--wait", default=60.0, show_default=True, help="Seconds to wait for a server that is away."
    )
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
        if needed or config or asked or (url and run):  # a lone ROQ_REDIS names no run
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
                    raise UnknownRun(f"there is no run in {job.run.dir} yet; `roq up {config}` starts it")
                return Target(url, run, wait_s, asleep=server)
    if url is None or run is None:
        raise ConfigError(
            "which run? Give a job file, or --redis URL and --run NAME (or ROQ_REDIS and ROQ_RUN)"
        )
    return Target(url, run, wait_s)


def echo_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> None:
    """Print columns; those whose place in ``right`` holds ``>`` are set to the right."""
    text = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    for row in text:
        cells = [
            cell.rjust(width) if right[i : i + 1] == ">" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


class EchoLog(logging.Handler):
    """roq's own warnings (a server that is waited for) as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        notice(record.getMessage())
