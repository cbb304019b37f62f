"""Durations of calls on the server, from its slow log, on runs of a given size.

python -m tests.protocol.durations --batch 64 --group 16 --eta 2
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import click
import redis

from roq import Reservation, RunConfig, Scheduler
from tests.conftest import Server
from tests.protocol.play import trajectory


def fill(sched: Scheduler, version: int, at_once: int) -> None:
    """Generate until no more prompts are admitted; a worker holds ``at_once`` trajectories."""
    held: list[Reservation] = []
    while True:
        held += sched.reserve("w", version, at_once - len(held)).reservations
        if not held:
            return
        for claim in held[: at_once // 2 + 1]:
            sched.complete(claim, trajectory(claim.v_traj, reward=claim.token))
        del held[: at_once // 2 + 1]


def milliseconds(client: redis.Redis) -> dict[str, list[float]]:
    """Function -> durations in the slow log, which is then cleared."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in client.slowlog_get(100_000):
        words = entry["command"].split()
        if words[0] in (b"FCALL", b"FCALL_RO"):
            found[words[1].decode().removeprefix("roq_")].append(entry["duration"] / 1000)
    client.slowlog_reset()
    return found


@click.command()
@click.option("--kind", type=click.Choice(["redis", "valkey"]), default="redis", show_default=True)
@click.option("--batch", default=64, show_default=True)
@click.option("--group", default=16, show_default=True)
@click.option("--eta", default=2, show_default=True)
@click.option("--steps", default=3, show_default=True)
def main(kind: str, batch: int, group: int, eta: int, steps: int) -> None:
    """Play a run and print the median and the longest duration of each function, in milliseconds."""
    config = RunConfig(eta=eta, batch_size=batch, group_size=group, lease_s=600, epochs=None)
    with tempfile.TemporaryDirectory(prefix="roq-durations-") as folder:
        server = Server(kind, Path(folder), "--appendonly", "yes", "--appendfsync", "always")
        server.redis.config_set("slowlog-log-slower-than", 0)
        server.redis.config_set("slowlog-max-len", 100_000)
        found: dict[str, list[float]] = defaultdict(list)

        def note() -> None:
            for name, values in milliseconds(server.redis).items():
                found[name] += values

        try:
            with Scheduler(server.url, "durations") as sched:
                sched.create(config)
                for version in range(steps):
                    fill(sched, version, 256)
                    note()
                    sched.renew("w")
                    sched.status()
                    sched.verify()
                    assert sched.take("t") is not None
                    sched.publish(version + 1, "w", "t")
                    sched.checkpointed(version + 1, "t")
                    note()
                sched.reserve("gone", steps, 64)
                sched.leave("gone")
                note()
        finally:
            server.kill()
    for name, values in sorted(found.items()):
        click.echo(
            f"{name:14}{len(values):7} calls   median {statistics.median(values):7.3f} ms   "
            f"longest {max(values):7.3f} ms"
        )


if __name__ == "__main__":
    main()
