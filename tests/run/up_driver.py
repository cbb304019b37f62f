"""``roq up`` with the stand-ins of standin.py: ``python up_driver.py CONFIG [trainer's arguments]``."""

import functools
import logging
import sys
from pathlib import Path

from roq.errors import RoqError
from roq.observe.display import Display
from roq.run.supervisor import Restarts
from roq.run.up import up

STANDIN = str(Path(__file__).with_name("standin.py"))


def command(kind: str, extra: list[str], url: str, run: str, _ranks: int = 1) -> list[str]:
    return [sys.executable, STANDIN, kind, "--redis", url, "--run", run, *extra]


logging.getLogger("roq").addHandler(logging.NullHandler())
restarts = Restarts(first_s=0.1, most=3, healthy_s=60)
worker = functools.partial(command, "worker", [])
trainer = functools.partial(command, "trainer", sys.argv[2:])
try:
    summary, number = up(
        Path(sys.argv[1]), Display(sys.stdout), worker=worker, trainer=trainer, restarts=restarts
    )
except RoqError as error:
    sys.exit(f"{type(error).__name__}: {error}")
if summary is not None and summary.shortfall:
    sys.exit(f"RunIncomplete: {summary.shortfall}")
sys.exit(0 if summary is not None else 128 + number)
