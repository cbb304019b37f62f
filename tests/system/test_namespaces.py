"""Two workers, a trainer and Redis, each in a network namespace with its own address, joined by a bridge.

One worker's link goes down for longer than its lease and comes back. The workers and the trainer are those of
the chaos driver: the real protocol, without engines. With engines: tests/system/test_hosts.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq import RunConfig
from roq.protocol.functions import ROLES
from tests.system.chaos.worker import LEASE_S
from tests.system.network import ADDRESS, Deployment, Network, network
from tests.waiting import eventually

__all__ = ["network"]

CONFIG = RunConfig(eta=2, batch_size=8, group_size=2, lease_s=LEASE_S, max_attempts=50, event_log=1_000_000)
CHAOS = Path(__file__).parent / "chaos"


class Players(Deployment):
    """With the chaos driver's workers and trainer."""

    def worker(self, host: str, seed: int) -> None:
        self.start(host, host, sys.executable, CHAOS / "worker.py", self.url("worker"), "net", seed)

    def trainer(self) -> None:
        folder = self.folder / "checkpoints"
        folder.mkdir()
        self.start("train", "train", sys.executable, CHAOS / "trainer.py", self.url("trainer"), "net", folder)


@pytest.fixture
def deployment(network: Network, tmp_path: Path) -> Iterator[Players]:
    made = Players(network, tmp_path)
    yield made
    made.kill()


@pytest.mark.slow
def test_hosts_of_their_own(deployment: Players, network: Network) -> None:
    with deployment.local("admin") as admin:
        admin.create(CONFIG, weights="w0")
    with deployment.local("board") as board:
        deployment.worker("one", 1)
        deployment.worker("two", 2)
        deployment.trainer()
        eventually(lambda: board.status().version >= 5, 60)
        peers = {
            name: network.start(name, "ip", "-j", "address", "show", "eth", stdout=subprocess.PIPE)
            for name in ("one", "two", "train")
        }
        for name, process in peers.items():
            shown = json.loads(process.communicate(timeout=10)[0])
            assert ADDRESS[name] in str(shown)
        assert len(board.status().workers) == 2

        # one worker's cable is out for longer than its lease: the other takes its work over
        lost = (deployment.folder / "two.log").read_text().split()[0]
        network.link("two", "down")
        eventually(lambda: lost not in {worker.worker for worker in board.status().workers}, 20)
        at = board.status().version
        eventually(lambda: board.status().version >= at + 3, 60)
        # and back: it drops what it lost, and goes on under its old name
        network.link("two", "up")
        eventually(lambda: lost in {worker.worker for worker in board.status().workers}, 60)
        at = board.status().version
        eventually(lambda: board.status().version >= at + 3, 60)

        # the trainer's and the server's cables too
        for name in ("train", "redis"):
            network.link(name, "down")
            time.sleep(2 * LEASE_S)
            network.link(name, "up")
            at = board.status().version
            eventually(lambda at=at: board.status().version >= at + 2, 60)

        deployment.stop("one", "two", "train")
        assert board.status().workers == []
        assert board.verify() == []
        audit = board.audit()
    assert audit.problems == []
    assert audit.expired > 0
    assert max(audit.staleness) <= CONFIG.eta
    for name in ("one", "two", "train"):
        log = (deployment.folder / f"{name}.log").read_text()
        assert "Traceback" not in log
        assert not any((deployment.folder / "secrets" / role).read_text().strip() in log for role in ROLES)
