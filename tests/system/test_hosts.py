"""Real engines and the real trainer on hosts of their own, which share no disk: weights are sent (gloo).

Two workers, a trainer of two nodes (torchrun) and Redis (TLS, a user for each role), each in a network
namespace of its own. The workers see the base model, but nothing that the trainer writes. The process that
sends weights is killed, and then a node of the trainer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from roq import Scheduler
from roq.protocol.functions import ROLES
from tests.conftest import environment
from tests.system.conftest import JOB, until
from tests.system.network import ADDRESS, Deployment, Network, network

__all__ = ["network"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40


class Hosts(Deployment):
    """With real workers and a real trainer."""

    def __init__(self, network: Network, folder: Path, base: Path) -> None:
        super().__init__(network, folder)
        (folder / "base").symlink_to(base)
        (folder / "run").mkdir()
        job = folder / "job.toml"
        settings = {"steps": STEPS, "workers": 2, "lease_s": 5, "kv": "recompute", "batch": 4, "protocol": ""}
        settings |= {"transfer": "gloo", "trainer": "data_parallel = 2"}
        text = JOB.format(**settings).replace('name = "e2e"', 'name = "net"')
        job.write_text(text + f"\n[redis]\nurl = {json.dumps(self.url('admin'))}\n")
        init = self.network.start(
            "train",
            *[sys.executable, "-c", "from roq.cli import main; main(prog_name='roq')", "init", job],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said, _ = init.communicate(timeout=60)
        assert init.returncode == 0, said

    def worker(self, host: str) -> None:
        """Over the run's folder lies another, empty one, as on a host that does not mount it."""
        run = self.folder / "run"
        hide = f'mount -t tmpfs none "{run}" && exec "$@"'
        program = [sys.executable, "-m", "roq_worker", "--redis", self.url("worker"), "--run", "net"]
        self.start(host, host, "sh", "-c", hide, "sh", *program, "--name-prefix", host)

    def trainer(self) -> None:
        """On two nodes: the same command on each, but for its own address."""
        job = ["roq_trainer", "--redis", self.url("trainer"), "--run", "net"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS['train']}:29400"]
        for node in ("train", "train2"):
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            # Names resolve nowhere here, so torchrun must be told which node it is.
            run += [*meet, "--local-addr", ADDRESS[node], "--rdzv-conf", f"is_host={int(node == 'train')}"]
            run += ["-m", "--", *job]
            self.start(node, node, "env", "GLOO_SOCKET_IFNAME=eth", *run)

    def sender(self) -> psutil.Process:
        """The process beside rank 0, on whichever node that is."""
        nodes = [psutil.Process(self.processes[node].pid) for node in ("train", "train2")]
        found: list[psutil.Process] = []
        for child in (child for node in nodes for child in node.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                if "roq_trainer.sender" in child.cmdline():
                    found.append(child)
        (sender,) = found
        return sender

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def hosts(network: Network, tmp_path: Path, base: Path) -> Iterator[Hosts]:
    made = Hosts(network, tmp_path, base)
    yield made
    made.kill()


def counted(board: Scheduler) -> dict[str, tuple[int, int]]:
    """For each worker: weights loaded, and those of them that were received."""
    shown = {worker.worker: json.loads(worker.info or "{}") for worker in board.status().workers}
    return {name: (info.get("swaps", 0), info.get("received", 0)) for name, info in shown.items()}


def test_hosts_that_share_no_disk(hosts: Hosts) -> None:
    with hosts.local("board") as board:

        def trained(version: int) -> None:
            until(lambda: board.status().version >= version, f"version {version}")

        hosts.trainer()
        hosts.worker("one")
        trained(2)
        sender = hosts.sender()
        until(lambda: sum(received for _, received in counted(board).values()) >= 1, "weights to be received")

        with hosts.local("operator") as operator:
            operator.pause()  # the run is short: it would be over before another engine has started
        hosts.worker("two")  # joins in the middle of the run, and finds no file of its weights
        until(lambda: len(counted(board)) == 2, "the second worker")
        until(lambda: all(received for _, received in counted(board).values()), "it to receive weights")

        with hosts.local("operator") as operator:
            operator.resume()
        sender.send_signal(signal.SIGKILL)
        trained(board.status().version + 2)
        successor = hosts.sender()
        os.kill(hosts.processes["train"].pid, signal.SIGKILL)
        for node in ("train", "train2"):
            assert hosts.processes[node].wait(60) != 0
        until(lambda: not successor.is_running(), "the sender to end with its trainer")
        hosts.trainer()
        until(lambda: board.status().ended, "the end of the run")
        counts = counted(board)
        for name in ("train", "train2", "one", "two"):
            assert hosts.processes[name].wait(60) == 0, hosts.said(name)[-3000:]
        assert board.verify() == []
        audit = board.audit()
    assert audit.problems == []
    assert audit.fates["trained"] == STEPS * 4
    assert max(audit.staleness) <= 1
    assert all(swaps == received for swaps, received in counts.values()), "there are no files to read"
    for name in ("one", "two", "train"):
        assert "Traceback" not in hosts.said(name)
        for role in ROLES:
            assert (hosts.folder / "secrets" / role).read_text().strip() not in hosts.said(name)
