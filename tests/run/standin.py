"""Light stand-ins for a worker and a trainer: real processes on the real scheduler, without engines.

They exist to test what ``roq up`` does around its processes, nothing else. Run as
``python standin.py worker|trainer --redis URL --run NAME [--pace S] [--die-at STEP] [--exit CODE]
[--hold-at STEP]``; a held trainer continues once there is a file ``go`` next to the run's folder.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

from roq import RunEnded, Scheduler, Trajectory
from roq.job.stored import read_job

stopping = threading.Event()


def worker(sched: Scheduler, folder: Path, pace: float) -> None:
    name = f"standin-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    out = (folder / "workers" / f"{name}.jsonl").open("a")
    begun, tokens, version, signal_seen = time.time(), 0, 0, 0

    def record(done: bool) -> None:
        row = {"time": time.time(), "worker": name, "version": version, "wall_s": time.time() - begun}
        row |= {
            "tokens": tokens,
            "idle_s": 0.1,
            "scheduler_s": sched.stats.seconds,
            "rss_bytes": 1000,
            "done": done,
        }
        out.write(json.dumps(row) + "\n")
        out.flush()

    while not stopping.is_set():
        version = sched.renew(name, version, {"tokens_per_s": 7}).version
        grant = sched.reserve(name, version, 4)
        if grant.ended:
            break
        for claim in grant.reservations:
            if (folder.parent / "failing").exists():
                sched.fail(claim, "TypeError: the reward is a dict")
                continue
            reward = (claim.ordinal % 4) / 4
            sched.complete(claim, Trajectory([1], [2, 3], [-0.5, -0.1], [(version, 2)], reward))
            tokens += 2
        record(done=False)
        if not grant.reservations:
            signal_seen = sched.wait(max(signal_seen, grant.signal), 0.2)
        time.sleep(pace / 10)
    sched.leave(name)
    record(done=True)


def trainer(
    sched: Scheduler, folder: Path, pace: float, die_at: int | None, code: int, hold_at: int | None
) -> None:
    name = f"standin-trainer-{os.getpid()}"
    begun, done, asked = time.time(), sched.status().version, time.time()
    while not stopping.is_set():
        try:
            batch = sched.take(name, done)
        except RunEnded:
            sched.checkpointed(done, name)
            return
        if batch is None:
            sched.wait(sched.status().signal, 0.2)
            continue
        if done == die_at:
            print("RuntimeError: the gradient exploded", flush=True)
            if code < 0:
                os.kill(os.getpid(), -code)
            sys.exit(code)
        while done == hold_at and not (folder.parent / "go").exists() and not stopping.is_set():
            time.sleep(0.02)
        time.sleep(pace)
        members = [member for group in batch.groups for member in group.members]
        counts: dict[str, int] = {}
        for group in batch.groups:
            counts[str(group.staleness)] = counts.get(str(group.staleness), 0) + len(group.members)
        row = {
            "step": batch.version + 1,
            "time": time.time(),
            "reward/mean": sum(member.reward for member in members) / len(members),
            "staleness/max": max(group.staleness for group in batch.groups),
            "staleness/counts": counts,
            "groups": len(batch.groups),
            "trajectories": len(members),
            "tokens/response": sum(member.tokens for member in members),
            "time/wait_for_batch": time.time() - asked - pace,
            "time/step": pace,
            "scheduler_s": sched.stats.seconds,
            "wall_s": time.time() - begun,
            "rss_bytes": 2000,
            "replay": batch.replay,
        }
        with (folder / "metrics.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        done, asked = batch.version + 1, time.time()
        sched.publish(done, f"weights/{done}", name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--redis")
    parser.add_argument("--run")
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--exit", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with Scheduler(options.redis, options.run) as sched:
        folder = Path(read_job(sched).run.dir)
        (folder / "workers").mkdir(exist_ok=True)
        if options.kind == "worker":
            worker(sched, folder, options.pace)
        else:
            trainer(sched, folder, options.pace, options.die_at, options.exit, options.hold_at)


if __name__ == "__main__":
    main()
