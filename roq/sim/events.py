"""A real run from its events: which worker generated which response when, and each update's duration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from roq.errors import ConfigError
from roq.events.event import Event
from roq.events.history import Batch, GroupHistory, MemberHistory
from roq.events.replay import Replay

__all__ = ["RealRun", "Rolled", "Update"]


class Rolled(msgspec.Struct, kw_only=True):
    """One finished response: its last attempt's worker, when it was issued and handed in (s), its tokens."""

    ordinal: int
    member: int
    worker: str
    started: float
    finished: float
    tokens: int


class Update(msgspec.Struct, kw_only=True):
    """One update: when its batch was there, taken and published (s), and the batch's tokens."""

    version: int
    ready: float
    taken: float
    published: float
    response_tokens: int
    prompt_tokens: float
    trajectories: int


class RealRun(msgspec.Struct, kw_only=True):
    """The data that the simulator needs from a real run.

    Attributes:
        rolled: every finished response, in the order in which they were handed in.
        updates: every published update.
        loads: seconds from each publication until each worker first got new work with those weights; until
            the next publication, for a worker that had nothing in flight and got none.
        eta: the latest buffer of any reservation minus its version: the maximum staleness in use.
        batch_size, group_size: groups of a batch, most finished members of a group.
        started: the first reservation (s since the epoch).
    """

    rolled: list[Rolled]
    updates: list[Update]
    loads: list[float]
    eta: int
    batch_size: int
    group_size: int
    started: float

    @property
    def workers(self) -> list[str]:
        """The workers that finished something."""
        return sorted({response.worker for response in self.rolled})

    @property
    def seconds(self) -> float:
        """From the first publication to the last: the first batch holds the engines' start."""
        return self.updates[-1].published - self.updates[0].published

    @property
    def prompt_mean(self) -> float:
        """Mean tokens of a prompt, from the trainer's metrics; 1 if unknown."""
        tokens = sum(update.prompt_tokens for update in self.updates)
        return tokens / max(1, sum(update.trajectories for update in self.updates)) or 1.0

    @property
    def concurrency(self) -> int:
        """The most responses that one worker had under way at once."""
        most = 0
        for worker in self.workers:
            mine = [r for r in self.rolled if r.worker == worker]
            steps = sorted([(r.started, 1) for r in mine] + [(r.finished, -1) for r in mine])
            running = 0
            for _, change in steps:
                running += change
                most = max(most, running)
        return most

    def lengths(self) -> dict[int, list[int]]:
        """Response lengths by ordinal, members in order."""
        found: dict[int, dict[int, int]] = {}
        for response in self.rolled:
            found.setdefault(response.ordinal, {})[response.member] = response.tokens
        return {o: [members[m] for m in sorted(members)] for o, members in sorted(found.items())}

    @classmethod
    def replay(cls, events: Iterable[Event]) -> RealRun:
        """Read a run from its events, in order; unknown ones are ignored.

        Raises:
            ConfigError: the events contain no update, so there is nothing to fit.
        """
        found = _Recorder()
        for event in events:
            found.apply(event)
        if not found.updates or not found.rolled:
            raise ConfigError(
                "the events have no published update or no finished response; "
                "use the event log of a run that has trained"
            )
        return cls(
            rolled=found.rolled,
            updates=found.updates,
            loads=found.loads,
            eta=found.ahead,
            batch_size=found.batch_size,
            group_size=max(Counter(r.ordinal for r in found.rolled).values()),
            started=min(group.reserved for group in found.groups.values()),
        )


class _Recorder(Replay):
    def __init__(self) -> None:
        super().__init__()
        self.rolled: list[Rolled] = []
        self.updates: list[Update] = []
        self.loads: list[float] = []
        self.batch_size = 0
        self._worked: set[str] = set()
        self._loaded: set[str] = set()  # got work with the newest weights
        self._published_at = 0.0

    def on_reserved(self, group: GroupHistory, worker: str) -> None:
        self._worked.add(worker)
        if group.v_traj == self.version > 0 and worker not in self._loaded:
            self._loaded.add(worker)
            self.loads.append(self.time - self._published_at)

    def on_completed(self, group: GroupHistory | None, number: int, member: MemberHistory) -> None:
        if group is not None and member.issued is not None:  # else it was issued before the log begins
            self.rolled.append(
                Rolled(
                    ordinal=group.ordinal,
                    member=number,
                    worker=member.worker,
                    started=member.issued,
                    finished=self.time,
                    tokens=member.tokens,
                )
            )

    def on_taken(self, batch: Batch) -> None:
        self.batch_size = max(self.batch_size, len(batch.groups))

    def on_published(self, batch: Batch | None) -> None:
        if self.version > 1:
            idle = {worker for worker, claims in self.workers.items() if not claims}
            self.loads += [self.time - self._published_at] * len(idle & self._worked - self._loaded)
        self._published_at = self.time
        self._loaded.clear()
        if batch is not None:
            self.updates.append(
                Update(
                    version=self.version,
                    ready=max((group.occupied or 0.0 for group in batch.groups), default=0.0),
                    taken=batch.taken,
                    published=self.time,
                    response_tokens=batch.tokens,
                    prompt_tokens=batch.metrics.get("tokens/prompt", 0.0),
                    trajectories=int(batch.metrics.get("trajectories", 0)),
                )
            )
