"""Helpers that play a worker and a trainer in the protocol's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from roq import Batch, Completion, Reservation, RunConfig, Scheduler, Trajectory
from roq.client.connect import connect
from roq.protocol.keys import keys_of

REWARDS = {1: 0.0, 2: 1.0}


def trajectory(
    version: int = 0, reward: float = 1.0, tokens: int = 2, newest: int | None = None
) -> Trajectory:
    """A finished response of ``tokens`` tokens from one version, or half and half from two."""
    segments = [(version, tokens)]
    if newest is not None and newest != version:
        segments = [(version, tokens - 1), (newest, 1)]
    return Trajectory([1, 2, 3], [7] * tokens, [-0.5] * tokens, segments, reward)


class Named:
    """A run whose groups are named by letters, A for the first prompt issued, as in the article."""

    def __init__(self, sched: Scheduler, config: RunConfig, worker: str = "w0") -> None:
        self.sched = sched
        self.worker = worker
        self.claims: dict[str, list[Reservation]] = {}
        sched.create(config)

    def admit(self, version: int, limit: int) -> str:
        """Reserve; returns what was admitted, such as "A 1.4, B 1.3"."""
        grant = self.sched.reserve(self.worker, version, limit)
        self.verify()
        named: list[str] = []
        for claim in grant.reservations:
            name = chr(ord("A") + claim.ordinal)
            self.claims.setdefault(name, []).append(claim)
            if len(self.claims[name]) == 1:
                named.append(f"{name} {claim.buffer}.{claim.slot}")
        return ", ".join(named)

    def complete(self, name: str, rewards: Sequence[float] = (1.0,)) -> Completion:
        """Complete all claimed members of a group; returns the last answer."""
        answers = [
            self.sched.complete(claim, trajectory(claim.v_traj, reward))
            for claim, reward in zip(self.claims[name], _cycle(rewards), strict=False)
        ]
        self.verify()
        return answers[-1]

    def take(self) -> str | None:
        """Take; the batch's letters in slot order."""
        batch = self.sched.take("t0")
        self.verify()
        return None if batch is None else self.letters(batch)

    def letters(self, batch: Batch) -> str:
        return "".join(chr(ord("A") + group.ordinal) for group in batch.groups)

    def publish(self, version: int) -> None:
        self.sched.publish(version, f"weights/{version}", "t0")
        self.verify()

    def group(self, name: str) -> int:
        return self.claims[name][0].group

    def verify(self) -> None:
        assert self.sched.verify() == []

    def picture(self) -> list[str]:
        """The buffers of the window, such as "O:A O:D . R:F"."""
        keys = keys_of(self.sched.run)
        with direct(self.sched) as client:
            size = int(client.hget(keys["config"], "buffer_slots"))
            slots = {place.decode(): text.decode() for place, text in client.hgetall(keys["slots"]).items()}
        names = {claims[0].group: name for name, claims in self.claims.items()}
        status = self.sched.status()
        lines: list[str] = []
        for buffer in range(status.frontier, status.window_end + 1):
            cells: list[str] = []
            for slot in range(1, size + 1):
                content = slots.get(f"{buffer}.{slot}")
                if content is None:
                    cells.append(".")
                else:
                    kind, group = content.split()
                    cells.append(f"{kind[0].upper()}:{names[int(group)]}")
            lines.append(" ".join(cells))
        return lines


def _cycle(rewards: Sequence[float]) -> Iterator[float]:
    while True:
        yield from rewards


@contextmanager
def direct(sched: Scheduler) -> Iterator[Any]:
    """A plain Redis client of a run's server."""
    with closing(connect(sched.url)) as client:
        yield client


def by_hand(sched: Scheduler, function: str, *values: str | int | bytes) -> Any:
    """Call a function of the library without the scheduler's checks."""
    keys = keys_of(sched.run).values()
    with direct(sched) as client:
        return client.execute_command("FCALL", f"roq_{function}", len(keys), *keys, *values)


def expire(sched: Scheduler, *workers: str) -> None:
    """Expire the leases of workers now, as if time had passed on the server."""
    with direct(sched) as client:
        for worker in workers:
            assert client.zadd(keys_of(sched.run)["heartbeats"], {worker: 1}, xx=True, ch=True) == 1


def events_of(sched: Scheduler) -> list[tuple[str, dict[str, str]]]:
    """The run's raw events in Redis: id, fields."""
    with direct(sched) as client:
        page = client.xrange(keys_of(sched.run)["events"])
    return [(i.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for i, fields in page]
