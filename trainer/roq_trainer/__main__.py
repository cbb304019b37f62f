"""``python -m roq_trainer --redis URL --run NAME``: one rank of the training process."""

from __future__ import annotations

import logging
import os
import sys

import click

from roq.errors import PeerFailed, RoqError
from roq.processes import die_with_parent, report_error, watch_parent
from roq.text import LineFormatter

__all__ = ["main"]


@click.command()
@click.option(
    "--redis",
    "url",
    required=True,
    envvar="ROQ_REDIS",
    metavar="URL",
    help="redis://…, rediss://… or unix:///path.sock; use ROQ_REDIS for a URL with a password.",
)
@click.option(
    "--run",
    required=True,
    envvar="ROQ_RUN",
    metavar="NAME",
    help="Name of the run, created by roq init or roq up.",
)
@click.option(
    "--address",
    envvar="ROQ_TRAINER_ADDRESS",
    help="Address of this host that workers can reach, to send weights from ([run] transfer). Default: "
    "the one used to reach the server.",
)
def main(url: str, run: str, address: str | None) -> None:
    """Train a run's model until the run ends. Start several ranks with torchrun.

    Exits 0 at the end of the run or after SIGTERM, 2 when the job cannot work, 1 on any other failure.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks must not outlive it: it restarts them
        die_with_parent()
    os.register_at_fork(after_in_child=watch_parent)  # Megatron forks to write checkpoints
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s rank {rank} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("roq").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    from roq_trainer.train import train

    try:
        train(url, run, address)
    except PeerFailed:
        code = 1  # rank 0 says why
    except RoqError as error:
        code = report_error("roq-trainer", error)
    else:
        return
    # Not sys.exit: destroying the process groups would wait for ranks that may be gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
