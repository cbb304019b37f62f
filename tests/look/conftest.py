"""A run in the middle of the worked example, on a server that subprocesses can reach."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq import RunConfig, Scheduler
from roq.run.embedded_server import EmbeddedServer
from tests.protocol.play import Named


@pytest.fixture
def url() -> Iterator[str]:
    """A real server of its own, in a folder whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="roqt"))
    server = EmbeddedServer(folder)
    server.start()
    yield server.url
    server.kill()
    shutil.rmtree(folder)


FIGURES = {"reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1, "tokens/response": 2048}


@pytest.fixture
def example(url: str) -> Iterator[Named]:
    """The worked example of the protocol after step 9: G and H and others wait in buffers 1 and 2."""
    with Scheduler(url, "demo") as sched:
        run = Named(sched, RunConfig(eta=1, batch_size=4, total_steps=9))
        sched.renew("w0", 0, {"tokens_per_s": 12, "doing": "generating"})
        run.admit(0, 6)
        for name in "ADCE":
            run.complete(name)
            run.admit(0, 1)
        run.take()
        run.complete("F")
        run.complete("G")
        sched.publish(1, "weights/1", "t0", FIGURES)
        run.admit(1, 4)
        run.complete("J")
        yield run
