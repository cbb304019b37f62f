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


@click.command()
@click.option("--redis", "url", required=True, envvar="ROQ_REDIS", help="Server URL: redis://… or unix://….")
@click.option("--run", required=True, envvar="ROQ_RUN", help="Name of the run; all else is stored with it.")
@click.option("--name-prefix", default="", help="Put before the worker's name, to tell hosts apart.")
def main(url: str, run: str, name_prefix: str) -> None:
    """Generate and score trajectories for a run until it has ended or SIGTERM comes.

    Exits 0 then, 2 when the job cannot work on this host, 1 for any other failure.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("roq").addFilter(_Sparing())
    # vLLM's and torch's about each other; Python's about what a killed engine process left to clean up.
    # Through the environment, as they come from child processes.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore:resource_tracker:UserWarning")
    warnings.simplefilter("ignore", FutureWarning)
    from roq_worker.rollout import rollout

    code = 0
    try:
        asyncio.run(rollout(url, run, name_prefix))
    except RoqError as error:
        code = report_error("roq-worker", error)
    _end(code)


class _Sparing(logging.Filter):
    """Lets one line through every 5 s: with the server away, every call under way says so."""

    said_at = -5.0

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        if time.monotonic() - self.said_at < 5.0:
            return False
        self.said_at = time.monotonic()
        return True


def _end(code: int) -> None:
    """End now: a start under way runs in a thread that cannot be stopped, and its processes stay behind."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # This one ends by itself, and first removes the shared memory that the others leave behind.
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
