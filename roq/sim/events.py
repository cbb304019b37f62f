"""A real run as its event stream tells it: who generated what, when, and how long each update took.

It reads the events itself: no slot matters here, and following them all with
:class:`roq.events.replay.Replay` takes more than twice as long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from roq.errors import ConfigError
from roq.events.event import Event, parse_place

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
    """What the simulator needs of a real run.

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
        """Mean tokens of a prompt, from the trainer's figures; 1 if they do not tell."""
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
        """Read a run from its events, in order; unknown ones are passed over.

        Raises:
            ConfigError: the events tell of no update, so there is nothing to learn from.
        """
        replay = _Replay()
        for event in events:
            replay.read(event)
        if not replay.updates or not replay.rolled:
            raise ConfigError(
                "these events hold no published update and no finished response: nothing to learn from; "
                "give the event log of a run that has trained"
            )
        sizes = Counter(r.ordinal for r in replay.rolled)
        return cls(
            rolled=replay.rolled,
            updates=replay.updates,
            loads=replay.loads,
            eta=replay.eta,
            batch_size=replay.batch_size,
            group_size=max(sizes.values()),
            started=replay.started,
        )


class _Replay:
    def __init__(self) -> None:
        self.rolled: list[Rolled] = []
        self.updates: list[Update] = []
        self.loads: list[float] = []
        self.eta = self.batch_size = 0
        self.started = 0.0
        # group -> member -> ordinal, when, to whom
        self._issued: defaultdict[int, dict[int, tuple[int, float, str]]] = defaultdict(dict)
        self._in_flight: Counter[str] = Counter()  # by worker
        self._tokens: Counter[int] = Counter()  # group -> tokens
        self._occupied: dict[int, float] = {}
        self._taken: dict[int, tuple[float, list[int]]] = {}
        self._published = 0
        self._published_at = 0.0
        self._loaded: set[str] = set()

    def read(self, event: Event) -> None:
        match event.name:
            case "reserve" | "issue" | "reissue" as name:
                self._issue(event, event.time, new=name == "reserve")
            case "complete":
                self._complete(event, event.time)
            case "cancelled" | "release" | "expired":
                for member in event.get("members", event.get("member")).split(","):
                    self._end(event.number("group"), int(member))
            case "requeued" | "discarded" | "filtered" | "dead":
                self._end_all(event.number("group"))
            case "worker_left" | "worker_lost":
                self._in_flight.pop(event.get("worker"), None)
            case "occupy":
                self._occupied[event.number("group")] = event.time
                self._end_all(event.number("group"))
            case "take":
                groups = [int(group) for group in event.get("groups").split()]
                self.batch_size = max(self.batch_size, len(groups))
                self._taken[event.number("version")] = (event.time, groups)
            case "publish":
                self._publish(event, event.time)
            case _:
                pass

    def _issue(self, event: Event, at: float, *, new: bool) -> None:
        self.started = self.started or at
        version, worker = event.number("v_traj"), event.get("worker")
        if new:
            self.eta = max(self.eta, parse_place(event.get("at")).buffer - version)
            if version == self._published > 0 and worker not in self._loaded:
                self._loaded.add(worker)
                self.loads.append(at - self._published_at)
        for member in event.get("members").split(","):
            self._issued[event.number("group")][int(member)] = (event.number("ordinal"), at, worker)
            self._in_flight[worker] += 1

    def _end(self, group: int, member: int) -> tuple[int, float, str] | None:
        """A claim is over; what it was, None when it was issued before the log begins."""
        issued = self._issued[group].pop(member, None)
        if issued is not None:
            self._in_flight[issued[2]] -= 1
        return issued

    def _end_all(self, group: int) -> None:
        """Nobody works for a group any more."""
        for _, _, worker in self._issued.pop(group, {}).values():
            self._in_flight[worker] -= 1

    def _complete(self, event: Event, at: float) -> None:
        group, member, tokens = event.number("group"), event.number("member"), event.number("tokens")
        issued = self._end(group, member)
        if issued is None:
            return
        ordinal, started, worker = issued
        self._tokens[group] += tokens
        self.rolled.append(
            Rolled(
                ordinal=ordinal,
                member=member,
                worker=worker,
                started=started,
                finished=at,
                tokens=tokens,
            )
        )

    def _publish(self, event: Event, at: float) -> None:
        version = event.number("version")
        if self._published > 0:
            idle = [w for w, count in self._in_flight.items() if count == 0 and w not in self._loaded]
            self.loads += [at - self._published_at] * len(idle)
        self._published, self._published_at = version, at
        self._loaded.clear()
        taken = self._taken.get(version - 1)
        if taken is None:
            return
        figures = event.metrics
        self.updates.append(
            Update(
                version=version,
                ready=max((self._occupied.get(group, 0.0) for group in taken[1]), default=0.0),
                taken=taken[0],
                published=at,
                response_tokens=sum(self._tokens[group] for group in taken[1]),
                prompt_tokens=figures.get("tokens/prompt", 0.0),
                trajectories=int(figures.get("trajectories", 0)),
            )
        )
