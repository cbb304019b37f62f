"""A trainer stub for the chaos driver: real checkpoints on disk, no model. Its "weights" are a hash chain
over the bytes of every batch, so a batch that changes between two deliveries is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from roq import Scheduler, Trajectory
from roq.types import Batch

CHECKPOINT_EVERY = 5


def newest_checkpoint(folder: Path) -> tuple[int, str]:
    """Version and weights of the newest complete checkpoint."""
    found = sorted(folder.glob("checkpoint-*.json"))
    if not found:
        return 0, ""
    state = json.loads(found[-1].read_text())
    return state["version"], state["weights"]


def write(path: Path, text: str) -> None:
    """A file is complete or not there."""
    draft = path.with_suffix(f".tmp-{os.getpid()}")  # a frozen predecessor may be writing it too
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def digest(weights: str, batch: Batch, payloads: list[list[Trajectory]]) -> str:
    """The weights after a batch."""
    chain = hashlib.sha256(weights.encode())
    for group, members in zip(batch.groups, payloads, strict=True):
        chain.update(f"{group.ordinal} {group.slot} {group.v_traj}".encode())
        for member in members:
            chain.update(member.encode())
    return chain.hexdigest()


def main(url: str, run: str, folder: Path) -> None:
    """Train until SIGTERM; exits 3 when a batch came back changed."""
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    trainer = f"trainer-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    print(trainer, flush=True)
    version, weights = newest_checkpoint(folder)
    with Scheduler(url, run, retry_s=None) as sched:
        eta, ready = sched.config().eta, 0
        while not stopping:
            batch = sched.take(trainer, version)
            if batch is None:
                ready = sched.wait(ready, 0.5, batch=True)
                continue
            assert all(0 <= group.staleness <= eta for group in batch.groups), batch
            weights = digest(weights, batch, sched.trajectories(batch.groups))
            log = folder / f"batch-{batch.version:06d}.txt"
            if log.exists():
                if log.read_text() != weights:
                    print(f"batch {batch.version} came back changed", flush=True)
                    sys.exit(3)
            else:
                assert not batch.replay, batch
                write(log, weights)
            time.sleep(0.05)  # training
            version += 1
            if version % CHECKPOINT_EVERY == 0:
                write(
                    folder / f"checkpoint-{version:06d}.json",
                    json.dumps({"version": version, "weights": weights}),
                )
            sched.publish(version, weights, trainer)
            sched.announce_sender(f"127.0.0.1:{version}/none", trainer)
            if version % CHECKPOINT_EVERY == 0:
                sched.checkpointed(version, trainer)
                for old in sorted(folder.glob("checkpoint-*.json"))[:-2]:
                    old.unlink()
            sched.retire_weights(trainer, keep=2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
