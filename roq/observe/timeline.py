"""A run's events made into what a report tells: its steps, its waste, who waited, how long and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean

import msgspec

from roq.config import RunConfig
from roq.events.event import Event, parse_place
from roq.events.replay import Group, Replay

__all__ = ["Span", "Step", "Story", "Waiting", "bins", "cause", "overlap", "tell", "verdict", "waiting"]

Span = tuple[float, float]
MUCH = 0.2  # share of its time that a side may wait before it counts as waiting
NOTABLE = 0.1  # share of a wait from which on a part of it is told
UNTRAINED = ("filtered", "discarded", "requeued", "dead")


class Step(msgspec.Struct):
    """One batch, from the wait for it to its weights. Times in seconds since 1970, lengths in seconds.

    Attributes:
        number: the version that it publishes, from 1.
        waited_from: when the trainer could have taken it; None if that is not known.
        taken, published: when; ``published`` is None for a batch still in training.
        staleness: its groups by staleness. tokens, reward: of its trajectories; reward None without any.
        groups: its groups, in slot order. metrics: what the trainer published.
    """

    number: int
    waited_from: float | None
    taken: float
    groups: list[Group]
    published: float | None = None
    metrics: dict[str, float] = {}

    @property
    def wait_s(self) -> float:
        """How long the trainer waited for it."""
        return 0.0 if self.waited_from is None else max(0.0, self.taken - self.waited_from)

    @property
    def train_s(self) -> float | None:
        """From take to publish."""
        return None if self.published is None else self.published - self.taken

    @property
    def staleness(self) -> Counter[int]:
        """Its groups by staleness."""
        return Counter(self.number - 1 - group.v_traj for group in self.groups)

    @property
    def tokens(self) -> int:
        """Response tokens in it."""
        return sum(group.tokens for group in self.groups)

    @property
    def reward(self) -> float | None:
        """Mean reward of its trajectories."""
        rewards = [m.reward for g in self.groups for m in g.members.values() if m.reward is not None]
        return fmean(rewards) if rewards else None

    @property
    def last(self) -> Group | None:
        """The group that made it READY."""
        known = [group for group in self.groups if group.occupied is not None]
        return max(known, key=lambda group: group.occupied or 0.0, default=None)


class Story(msgspec.Struct):
    """What happened in a run.

    Attributes:
        run, eta: its name ("" when unknown) and its maximum staleness.
        began, at_work, until: time of the first event, of the first trajectory issued, and of the last event.
        ended: whether it reached its end.
        steps: the batches, in order.
        groups: all groups, by number.
        attached: when each worker was there. idle: when each of these had nothing in flight.
        pauses: when admission was paused.
        counts: how often each event happened. missing: events that are not known; None if not even how many.
        generated: tokens that the engines made, the unfinished included; None when nobody counted.
    """

    run: str = ""
    eta: int = 0
    began: float = 0.0
    at_work: float = 0.0
    until: float = 0.0
    ended: bool = False
    steps: list[Step] = []
    groups: dict[int, Group] = {}
    attached: dict[str, list[Span]] = {}
    idle: dict[str, list[Span]] = {}
    pauses: list[Span] = []
    counts: Counter[str] = msgspec.field(default_factory=Counter[str])
    missing: int | None = 0
    generated: int | None = None

    @property
    def wall_s(self) -> float:
        """From the first event to the last."""
        return self.until - self.began

    @property
    def work_s(self) -> float:
        """From the first trajectory issued to the last event."""
        return self.until - self.at_work

    @property
    def waits(self) -> list[Span]:
        """When the trainer waited for a batch."""
        spans = [(s.waited_from, s.taken) for s in self.steps if s.waited_from is not None]
        last = self.steps[-1].published if self.steps else None
        return spans if last is None or self.ended else [*spans, (last, self.until)]

    def tokens(self) -> dict[str, int]:
        """Finished response tokens by what became of their group; ``open``: it is still in the run."""
        found: Counter[str] = Counter()
        for group in self.groups.values():
            known = group.state if group.state in ("trained", *UNTRAINED) else "open"
            found[known] += group.tokens
        return dict(found)

    def idle_share(self, span: Span) -> float | None:
        """Share of the workers' time in ``span`` that they had nothing in flight; None without workers."""
        there = sum(overlap(spans, span) for spans in self.attached.values())
        return sum(overlap(spans, span) for spans in self.idle.values()) / there if there > 0 else None


def overlap(spans: Iterable[Span], span: Span) -> float:
    """Seconds of ``span`` that lie in ``spans``, which do not overlap each other.

    >>> overlap([(0.0, 2.0), (3.0, 9.0)], (1.0, 4.0))
    2.0
    """
    return sum(max(0.0, min(end, span[1]) - max(start, span[0])) for start, end in spans)


class _Busy:
    """Spans in which something was true of each of several things."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        self._since: dict[str, float] = {}

    def begin(self, name: str, time: float) -> None:
        self._since.setdefault(name, time)

    def end(self, name: str, time: float) -> None:
        if (since := self._since.pop(name, time)) < time:
            self.spans.setdefault(name, []).append((since, time))

    def close(self, time: float) -> None:
        for name in list(self._since):
            self.end(name, time)


class _Teller:
    def __init__(self) -> None:
        self.story = Story()
        self.replay = Replay()
        self.free_at: float | None = None  # when the trainer began to wait
        self.claims: dict[int, dict[int, str]] = {}  # group -> member -> who has it
        self.held: Counter[str] = Counter()
        self.attached, self.idle, self.paused = _Busy(), _Busy(), _Busy()

    def take_in(self, event: Event) -> None:
        story = self.story
        story.began = story.began or event.time
        story.until = max(story.until, event.time)
        story.counts[event.name] += 1
        self.replay.feed(event)
        match event.name:
            case "gap":
                known = "missing" in event.fields and story.missing is not None
                story.missing = (story.missing or 0) + event.number("missing") if known else None
            case "reserve":
                story.eta = max(story.eta, parse_place(event.get("at")).buffer - event.number("v_traj"))
                self._issued(event)
            case "issue" | "reissue":
                self._issued(event)
            case "judging":
                self._over(event)
                self._issued(event)
            case "complete" | "release" | "expired":
                self._over(event, event.number("member"))
            case "occupy" | "requeued" | "discarded" | "filtered" | "dead":
                self._over(event)
            case "worker_joined":
                self._joined(event.get("worker"), event.time)
            case "worker_left" | "worker_lost":
                self.idle.end(event.get("worker"), event.time)
                self.attached.end(event.get("worker"), event.time)
            case "trainer_joined":
                if self.replay.training is None:
                    self.free_at = event.time
            case "take":
                numbers = map(int, event.get("groups").split())
                groups = [self.replay.groups[number] for number in numbers if number in self.replay.groups]
                story.steps.append(Step(event.number("version") + 1, self.free_at, event.time, groups))
            case "publish":
                self.free_at = event.time
                if story.steps and story.steps[-1].number == event.number("version"):
                    story.steps[-1].published, story.steps[-1].metrics = event.time, event.metrics
            case "paused":
                self.paused.begin("run", event.time)
            case "resumed":
                self.paused.end("run", event.time)
            case _:
                pass

    def _joined(self, worker: str, time: float) -> None:
        self.attached.begin(worker, time)
        self.idle.begin(worker, time)

    def _issued(self, event: Event) -> None:
        worker, claims = event.get("worker"), self.claims.setdefault(event.number("group"), {})
        self.attached.begin(worker, event.time)  # it may have joined before the first event known
        self.idle.end(worker, event.time)
        for member in (event.get("members") or "0").split(","):
            claims[int(member)] = worker
            self.held[worker] += 1

    def _over(self, event: Event, member: int | None = None) -> None:
        """A claim on the event's group is over, or all that are left."""
        claims = self.claims.get(event.number("group"), {})
        for number in list(claims) if member is None else [member]:
            worker = claims.pop(number, None)
            if worker is None:
                continue
            self.held[worker] -= 1
            if self.held[worker] == 0:
                self.idle.begin(worker, event.time)
        if not claims:
            self.claims.pop(event.number("group"), None)

    def told(self) -> Story:
        story = self.story
        for spans in (self.attached, self.idle, self.paused):
            spans.close(story.until)
        story.groups, story.ended = self.replay.groups, self.replay.ended
        story.attached, story.idle = self.attached.spans, self.idle.spans
        story.pauses = self.paused.spans.get("run", [])
        return story


def tell(events: Iterable[Event], config: RunConfig | None = None, run: str = "") -> Story:
    """The story of a run's events; ``config`` and ``run`` are found in an archive's first line too.

    Without a configuration, eta is the farthest that a group was reserved ahead.
    """
    teller = _Teller()
    for event in events:
        if event.name == "archive":
            config = config or msgspec.json.decode(event.get("config"), type=RunConfig)
            run = run or event.get("run")
        else:
            teller.take_in(event)
    story = teller.told()
    story.run = run
    story.at_work = min((group.reserved for group in story.groups.values()), default=story.began)
    story.eta = story.eta if config is None else config.eta
    return story


# ---- why -----------------------------------------------------------------------------------------


def cause(story: Story, step: Step) -> str:
    """Why the trainer waited for a batch, in a sentence or two."""
    assert step.waited_from is not None
    span = (step.waited_from, step.taken)
    said: list[str] = []
    gaps = _without(story.attached.values(), span)
    if gaps > NOTABLE * step.wait_s:
        said.append(f"no worker was attached for {gaps:.1f} s")
    if gaps < (starting := min(story.at_work, span[1]) - span[0]) and starting > NOTABLE * step.wait_s:
        said.append(f"no trajectory had been issued for {starting:.1f} s: engines start")
    if (paused := overlap(story.pauses, span)) > NOTABLE * step.wait_s:
        said.append(f"admission was paused for {paused:.1f} s")
    if (last := step.last) is not None and last.occupied is not None:
        said.append(_of_the_last(step, last, span))
    return "; ".join(said) or "unknown: the events of its groups are missing"


def _without(attached: Iterable[list[Span]], span: Span) -> float:
    """Seconds of ``span`` that lie in none of the workers' spans."""
    covered, at = 0.0, span[0]
    for start, end in sorted(s for spans in attached for s in spans):
        start, end = max(start, at), min(end, span[1])
        if end > start:
            covered, at = covered + end - start, end
    return span[1] - span[0] - covered


def _of_the_last(step: Step, last: Group, span: Span) -> str:
    slowest = max(last.members.items(), key=lambda item: item[1].completed or 0.0, default=None)
    text = f"its last group was {last.group} (prompt {last.ordinal})"
    if last.reserved > span[0] + NOTABLE * step.wait_s:
        text += f", reserved {last.reserved - span[0]:.1f} s into the wait"
    if slowest is not None:
        number, member = slowest
        if member.completed is not None and member.issued is not None:
            took = member.completed - member.issued
            text += f"; member {number} took {member.worker} {took:.1f} s for {member.tokens:,} tokens"
        if member.attempts > 1:
            text += f", in attempt {member.attempts}"
    if last.occupied and last.finished and last.occupied - last.finished > NOTABLE * step.wait_s:
        text += f"; its post-processing took {last.occupied - last.finished:.1f} s"
    others = sorted(g.occupied for g in step.groups if g.occupied is not None)[:-1]
    alone = (last.occupied or 0.0) - max([span[0], *others[-1:]])
    if alone > 0.5 * step.wait_s:
        text += f"; for {alone:.1f} s it alone was missing"
    return text


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Who waited, from the first weights published to the last: before, engines start, and after, they end.

    Attributes:
        trainer_s: seconds in which the trainer waited for a batch.
        trainer: their share of its time, 0 to 1.
        workers: share of the workers' time with nothing in flight; None when no worker was known.
    """

    trainer_s: float
    trainer: float
    workers: float | None


def _later(story: Story) -> list[Step]:
    return [step for step in story.steps[1:] if step.published is not None]


def waiting(story: Story) -> Waiting | None:
    """Who waited; None where fewer than three batches were trained. The one definition that all tell."""
    steps = _later(story)
    if len(steps) < 2:
        return None
    wait, train = sum(step.wait_s for step in steps), sum(step.train_s or 0.0 for step in steps)
    began = steps[0].taken if steps[0].waited_from is None else steps[0].waited_from
    return Waiting(
        trainer_s=round(wait, 3),
        trainer=wait / (wait + train) if wait + train else 0.0,
        workers=story.idle_share((began, steps[-1].published or story.until)),
    )


def verdict(story: Story) -> str:
    """What limits the run, with its numbers."""
    found = waiting(story)
    if found is None:
        return "Too few steps to say what limits this run."
    wait, waits, idle = found.trainer_s, found.trainer, found.workers or 0.0
    alone = sum(_alone(step) for step in _later(story))
    facts = f"the trainer waited {waits:.0%} of the time, the workers had nothing to do {idle:.0%} of theirs"
    tail = ""
    if wait and alone > 0.4 * wait:
        tail = f" {alone / wait:.0%} of the wait was for the last group of a batch alone: long responses."
    if waits >= MUCH and idle >= MUCH:
        return (
            f"Each side waits for the other: {facts}.{tail} More room would keep both busy: a larger η, "
            "or more trajectories in flight than one batch."
        )
    if waits >= MUCH:
        return f"Generation limits this run: {facts}.{tail} More or faster workers would shorten it."
    if idle >= MUCH:
        return f"Training limits this run: {facts}. Fewer workers would do, or a faster trainer."
    return f"Both sides are busy: {facts}."


def _alone(step: Step) -> float:
    """Seconds of a wait in which only one group was missing."""
    known = sorted(group.occupied for group in step.groups if group.occupied is not None)
    if len(known) < 2 or step.waited_from is None:
        return 0.0
    return max(0.0, min(known[-1], step.taken) - max(known[-2], step.waited_from))


def bins(story: Story, count: int) -> list[Span]:
    """The run's time at work in ``count`` equal parts."""
    edges = [story.at_work + story.work_s * i / count for i in range(count + 1)]
    return list(pairwise(edges))
