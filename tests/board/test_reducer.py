"""What the page computes from the events is what the server says, after any history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from roq import Refused, RunConfig, RunEnded, Scheduler
from roq.board.feed import config_of
from roq.board.picture import picture
from roq.events.fields import EVENTS
from roq.events.follow import read_events
from roq.protocol.snapshot import Snapshot
from tests.board.conftest import Board
from tests.conftest import Server
from tests.protocol.play import by_hand, expire, trajectory

# What a state says, in the words of the server; `middle`: a picture, and the events after it.
REDUCE = """async ([config, events, middle]) => {
  const {initial, restore, apply, buffers, ledger, running} = await import('/static/state.js');
  const say = (state) => ({
    version: state.version, frontier: state.frontier, paused: state.paused,
    training: state.training?.groups ?? [],
    slots: Object.fromEntries([...state.slots].map(
      ([place, n]) => [place, `${state.groups.get(n).kind} ${n}`])),
    v: Object.fromEntries([...state.groups.values()].map(g => [g.group, g.v])),
    claims: running(state).map(one => `${one.worker} ${one.group}.${one.member}`).sort(),
    held: Object.fromEntries([...state.workers.values()].map(w => [w.worker, w.claims])),
    idle: state.idle, ledger: ledger(state),
    rows: buffers(state).map(({buffer, state, occupied, reserved}) => [buffer, state, occupied, reserved]),
  });
  const whole = events.reduce(apply, initial(config));
  return [say(whole), middle && say(middle.events.reduce(apply, restore(config, middle.picture)))];
}"""

CONFIGS = (
    RunConfig(eta=1, batch_size=3),
    RunConfig(eta=0, batch_size=2, group_size=2, filter_zero_variance=True),
    RunConfig(eta=3, batch_size=2, buffer_slots=4, group_size=2, group_candidates=3, on_drop="discard"),
    RunConfig(eta=2, batch_size=3, buffer_slots=4, group_size=2, post_process="module:function"),
    RunConfig(eta=2, batch_size=2, group_size=2, total_steps=6, max_attempts=2),
)


class Life:
    """Two workers, a trainer and an operator who do what comes to mind."""

    def __init__(self, sched: Scheduler, config: RunConfig, seed: int) -> None:
        sched.create(config)
        self.sched = sched
        self.claims: list[Any] = []
        self.random = random.Random(seed)
        self.version = 0

    def live(self) -> None:
        """Do one thing; what is refused changes nothing and is fine."""
        act = self.random.choices(
            [
                self.reserve,
                self.complete,
                self.release,
                self.remove,
                self.take,
                self.publish,
                self.lapse,
                self.operate,
            ],
            [4, 9, 1, 1, 3, 3, 0.4, 0.4],
        )[0]
        try:
            act()
        except RunEnded:
            self.claims.clear()

    def worker(self) -> str:
        return self.random.choice(("w0", "w1"))

    def pop(self) -> Any:
        return self.claims.pop(self.random.randrange(len(self.claims)))

    def reserve(self) -> None:
        version = max(0, self.version - self.random.randint(0, 1))
        self.claims += self.sched.reserve(self.worker(), version, self.random.randint(1, 6)).reservations

    def complete(self) -> None:
        if not self.claims:
            return
        claim = self.pop()
        with _fine():
            if claim.member == 0:
                self.sched.judge(claim, keep=self.random.random() < 0.7, reason="dull")
                return
            done = self.sched.complete(claim, trajectory(claim.v_traj, float(self.random.randint(0, 1))))
            if done.judgement is not None:
                self.claims.append(done.judgement)

    def release(self) -> None:
        if self.claims:
            with _fine():
                if self.random.random() < 0.5:
                    self.sched.release(self.pop())
                else:
                    self.sched.fail(self.pop(), "test")

    def remove(self) -> None:
        groups = [claim.group for claim in self.claims] or [1]
        with _fine():
            self.sched.drop(self.random.choice(groups), reason="for the test")
        with _fine():
            self.sched.filter(self.random.randint(1, max(groups)), reason="for the test")
        with _fine():
            self.sched.reject(self.random.randint(1, max(groups)), reason="for the test")

    def take(self) -> None:
        with _fine():
            self.sched.take("t0")

    def publish(self) -> None:
        with _fine():
            self.sched.publish(self.version + 1, "w", "t0")
            self.version += 1

    def lapse(self) -> None:
        with _fine():
            if self.random.random() < 0.5:
                self.sched.leave(self.worker())
            else:
                alive = [w.worker for w in self.sched.status().workers if w.lease_left_s > 0]
                if alive:
                    expire(self.sched, self.random.choice(alive))

    def operate(self) -> None:
        with _fine():
            self.sched.pause()
            self.sched.resume()
            for letter in self.sched.dead():
                self.sched.revive(letter.ordinal)


class _fine:  # noqa: N801
    """The scheduler may refuse: the claim is gone, it is not the time, there is nothing of the kind."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, Refused) and not isinstance(error, RunEnded)


def look(sched: Scheduler) -> Snapshot:
    return Snapshot(by_hand(sched, "verify"))


def truth(sched: Scheduler) -> dict[str, Any]:
    """What the server says of the run, in the shape of REDUCE's ``say``."""
    snapshot, status = look(sched), sched.status()
    training = snapshot.batches.get(status.version, []) if status.training is not None else []
    held = {worker.worker: worker.claims for worker in status.workers}
    ledger = {name: getattr(status.ledger, name) for name in status.ledger.__struct_fields__}
    live = [group for _, group in snapshot.slots.values()] + training
    return {
        "version": status.version,
        "frontier": status.frontier,
        "paused": status.paused,
        "training": training,
        "slots": {f"{b}.{s}": f"{kind} {group}" for (b, s), (kind, group) in snapshot.slots.items()},
        "v": {str(group): snapshot.groups[group]["v"] for group in live},
        "claims": sorted(" ".join(claim) for claim in snapshot.claims),
        "held": held,
        "idle": sum(claims == 0 for claims in held.values()),
        "ledger": ledger,
        "rows": [[b.buffer, b.state, b.occupied, b.reserved] for b in status.buffers],
    }


def as_json(events: list[Any]) -> list[dict[str, str]]:
    return [{"id": event.id, **event.fields} for event in events]


@pytest.fixture(scope="module")
def page(servers: Callable[[str], Server], chromium: Browser) -> Iterator[Page]:
    """A page that can load the reducer."""
    with Scheduler(servers("valkey").url, "page") as sched:
        sched.create(RunConfig(eta=1, batch_size=1))
        board = Board("--redis", sched.url, "--run", "page")
    page = chromium.new_page()
    page.goto(board.url + "static/state.js")
    yield page
    page.close()
    board.stop()


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_the_reducer_agrees_with_the_server(server: Server, page: Page, config: RunConfig) -> None:
    seen: set[str] = set()
    for seed in range(5):
        with Scheduler(server.url, f"life-{seed}") as sched:
            life = Life(sched, config, seed)
            for _ in range(90):
                life.live()
            events = list(read_events(sched))
            middle = {"picture": picture(look(sched), []), "at": events[-1].id}
            for _ in range(90):
                life.live()
            everything = list(read_events(sched))
            after = everything[len(events) :]
            seen |= {event.name for event in everything}
            expected = truth(sched)
            given = [config_of(config), as_json(everything), {**middle, "events": as_json(after)}]
            whole, from_middle = page.evaluate(REDUCE, given)
            assert whole == expected, f"seed {seed}"
            assert from_middle == expected, f"seed {seed}, from the middle"
            assert sched.verify() == []
    assert {"reserve", "complete", "occupy", "take", "publish", "release", "worker_left"} <= seen


def test_every_event_has_its_code_and_its_words(page: Page) -> None:
    for module, table in (("state", "handlers"), ("words", "sentences")):
        names = page.evaluate(
            "async ([module, table]) => Object.keys((await import(`/static/${module}.js`))[table])",
            [module, table],
        )
        assert set(names) == set(EVENTS), module


def test_an_unknown_event_changes_nothing(page: Page) -> None:
    config = config_of(RunConfig(eta=1, batch_size=2))
    events = [
        {"id": "1-0", "event": "created"},
        {"id": "2-0", "event": "hyperspace", "group": "7", "moves": ""},
        {"id": "3-0", "event": "occupy", "group": "9", "at": "0.1", "v_traj": "0", "ordinal": "3"},
    ]
    (state, _) = page.evaluate(REDUCE, [config, events, None])
    assert state["slots"] == {}
    assert state["rows"] == [[0, "PENDING", 0, 0], [1, "PENDING", 0, 0]]
