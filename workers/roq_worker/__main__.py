"""``python -m roq_worker``: one rollout worker process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import warnings

import click

from roq.errors import RoqError
from roq.processes import report_error
from roq.text import LineFormatter


@click.command()
@click.option("--redis", "url", required=True, envvar="ROQ_REDIS", help="Server URL: redis://… or unix://….")
@click.option("--run", required=True, envvar="ROQ_RUN", help="Name of the run; the job is stored with it.")
@click.option("--name-prefix", default="", help="Prefix of the worker's name, such as the host's.")
def main(url: str, run: str, name_prefix: str) -> None:
    """Generate and score trajectories for a run until it ends or SIGTERM arrives.

    Exits 0 in both cases, 2 when the job cannot work on this host, 1 on any other failure.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("roq").addFilter(_RateLimit())
    # vLLM and torch warn about each other, Python about what a killed engine process left behind.
    # Child processes warn too, so this goes through the environment.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore:resource_tracker:UserWarning")
    warnings.simplefilter("ignore", FutureWarning)
    from roq_worker.rollout import rollout

    code = 0
    try:
        asyncio.run(rollout(url, run, name_prefix))
    except RoqError as error:
        code = report_error("roq-worker", error)
    _end(code)


class _RateLimit(logging.Filter):
    """Pass one line every 5 s: while the server is unreachable, every pending call logs it."""

    passed_at = -5.0

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        if time.monotonic() - self.passed_at < 5.0:
            return False
        self.passed_at = time.monotonic()
        return True


def _end(code: int) -> None:
    """Exit at once: a starting vLLM runs in a thread that cannot be stopped, and would leave processes."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # The resource tracker exits by itself, after removing the shared memory that the others leave.
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
