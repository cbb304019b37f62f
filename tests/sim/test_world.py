"""The whole simulation: nothing is lost, a run is a function of its seed, roq plays the worked example."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from roq import Scheduler
from roq.errors import ConfigError
from roq.events.event import Event
from roq.events.follow import read_events
from roq.sim.cost import load_cost
from roq.sim.policies import load_policy, policy_names
from roq.sim.policies.roq import Roq
from roq.sim.runs import simulate
from roq.sim.scenario import Scenario, changed, limits
from roq.sim.workload import Lognormal
from roq.sim.world import Policy, World
from tests.sim.conftest import groups

Make = Callable[..., Scenario]

SMALL = Scenario(
    cost=load_cost("qwen3-8b-h20"), batch_size=4, group_size=4, places=6, batches=12, trainer_gpus=2,
    lengths=Lognormal(groups=200, median=900),
)  # fmt: skip


@pytest.mark.parametrize("eta", [1, 2])
@pytest.mark.parametrize("policy", policy_names())
def test_conservation(policy: str, eta: int, url: str) -> None:
    """Every admitted group is trained, waiting, running or discarded; so is every decoded token."""
    scenario = Scenario(
        cost=SMALL.cost, eta=eta, batch_size=4, group_size=4, places=6, batches=12, trainer_gpus=2,
        lengths=SMALL.lengths,
    )  # fmt: skip
    world = World(scenario, load_policy(policy), 3, url)
    outcome = world.run()
    assert set(outcome.groups) <= {"trained", "waiting", "running", "discarded"}
    assert sum(outcome.groups.values()) == len(world.groups)
    assert [group.ordinal for group in world.groups] == list(range(len(world.groups)))
    assert outcome.groups["trained"] == 4 * 12
    assert all(sum(update.staleness.values()) == 16 for update in outcome.updates)
    assert all(0 <= s <= eta for update in outcome.updates for s in update.staleness)
    whole = {group.state for group in world.groups if all(sample.finished for sample in group.samples)}
    assert "running" not in whole
    thrown = sum(update.aborted_tokens + update.dropped_tokens for update in outcome.updates)
    thrown += world._aborted + world._dropped
    trained = sum(update.tokens for update in outcome.updates)
    counted = trained + thrown + outcome.waiting_tokens + outcome.unfinished_tokens
    assert outcome.generated_tokens == pytest.approx(counted)
    assert trained == sum(group.tokens for group in world.groups if group.state == "trained")
    if policy in ("roq", "nemo-in-order", "nemo-weight-fifo", "roll"):
        assert thrown == 0


def test_conservation_with_over_sampling(url: str) -> None:
    scenario = Scenario(
        cost=SMALL.cost, eta=2, batch_size=4, group_size=4, buffer_slots=6, group_candidates=5, places=12,
        batches=12, trainer_gpus=2, lengths=SMALL.lengths,
    )  # fmt: skip
    world = World(scenario, load_policy("roq"), 1, url)
    policy = world._policy
    assert isinstance(policy, Roq)
    outcome = world.run()
    thrown = sum(update.aborted_tokens + update.dropped_tokens for update in outcome.updates)
    thrown += world._aborted + world._dropped
    trained = sum(update.tokens for update in outcome.updates)
    counted = trained + thrown + outcome.waiting_tokens + outcome.unfinished_tokens
    assert thrown > 0
    assert outcome.generated_tokens == pytest.approx(counted)
    with Scheduler(url, policy.run) as scheduler:
        assert scheduler.verify() == []
        status = scheduler.status()
    assert status.ledger.trained == outcome.groups["trained"] == 48
    assert status.ledger.discarded == outcome.groups.get("discarded", 0)
    assert status.ledger.in_slots == outcome.groups["waiting"] + outcome.groups["running"]
    assert status.inflight == sum(instance.places - instance.free for instance in world.instances)


@pytest.mark.parametrize("policy", policy_names())
def test_a_run_is_a_function_of_its_seed(policy: str, url: str) -> None:
    assert simulate(SMALL, policy, 5, url) == simulate(SMALL, policy, 5, url)
    assert simulate(SMALL, policy, 5, url).updates != simulate(SMALL, policy, 6, url).updates


def test_roq_plays_the_worked_example(scenario: Make, url: str) -> None:
    """The table of docs/protocol.md, from the run's own events: A is group 1, B 2, and so on."""
    # When each ends gives its length: A, D, C, E at 1 to 4, F and G at 5 and 6, v1 at 7, J 8, H 9, K 10,
    # B 11, L 12, I 13, v2 at 14; G began at 1, H at 2, I to L at 7.
    lengths = (1, 11, 3, 2, 4, 5, 5, 7, 6, 1, 3, 5)
    setting = scenario(batch_size=4, places=6, batches=3)
    world = World(setting, load_policy("roq"), 0, url, groups(*lengths, *[50] * 12))
    policy = world._policy
    assert isinstance(policy, Roq)
    outcome = world.run()
    assert [update.published for update in outcome.updates] == pytest.approx([7, 14, 17])

    names = {str(number): letter for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWX", start=1)}

    def said(event: Event) -> str:
        moves = " ".join(f"{names[str(move.group)]} to {move.target}" for move in event.moves)
        who = names.get(event.get("group"), "")
        match event.name:
            case "reserve":
                return f"{who} {event.get('at')}"
            case "occupy":
                return f"{who} done {event.get('at')}" + (f", {moves}" if moves else "")
            case "take":
                return "take " + "".join(names[group] for group in event.get("groups").split())
            case "publish":
                return f"v{event.get('version')}"
            case _:
                return ""

    with Scheduler(url, policy.run) as scheduler:
        told = [line for event in read_events(scheduler) if (line := said(event))]
    assert told[: told.index("take JKLI") + 1] == [
        "A 1.4", "B 1.3", "C 1.2", "D 1.1", "E 0.4", "F 0.3",
        "A done 0.1, F to 1.4", "G 0.3",
        "D done 0.2, G to 1.1", "H 0.3",
        "C done 0.3, H to 1.2",
        "E done 0.4", "take ADCE",
        "F done 1.1, G to 1.4",
        "G done 1.2, H to 1.4",
        "v1", "I 2.4", "J 2.3", "K 2.2", "L 2.1",
        "J done 2.1, L to 2.3",
        "H done 1.3, B to 1.4",
        "K done 2.2",
        "B done 1.4", "take FGHB",
        "L done 2.3",
        "I done 2.4",
        "v2",
        "take JKLI",
    ]  # fmt: skip


def test_the_bound_and_the_invariants_hold_on_the_real_server(url: str) -> None:
    world = World(SMALL, load_policy("roq"), 0, url)
    policy = world._policy
    assert isinstance(policy, Roq)
    world.run()
    with Scheduler(url, policy.run) as scheduler:
        assert scheduler.verify() == []
        ledger = scheduler.status().ledger
    assert ledger.balanced
    assert ledger.issued == len(world.groups)
    assert ledger.trained == 48


def test_time_lost_although_a_batch_was_possible_is_counted(scenario: Make) -> None:
    """A policy that withholds its batch from t = 2, when it could have one, to t = 9, when the last ends."""

    class Reluctant(Policy):
        name = "reluctant"

        def __init__(self, world: World) -> None:
            super().__init__(world)
            self.queue = [world.new_group(0) for _ in range(4)]
            self.done: list[object] = []

        def admit(self, instance: object) -> list[object]:  # type: ignore[override]
            return [self.queue.pop(0).samples[0]] if self.queue else []

        def finish(self, samples: list[object]) -> None:  # type: ignore[override]
            self.done += [sample.group for sample in samples]  # type: ignore[attr-defined]

        def batch(self) -> list[object] | None:  # type: ignore[override]
            return self.done[:2] if len(self.done) == 4 else None

        def batch_possible(self) -> bool:
            return len(self.done) >= 2

    world = World(scenario(batches=1), load_policy("roll"), 0, None, groups(1, 2, 5, 9))
    world.groups.clear()
    world._policy = Reluctant(world)  # type: ignore[assignment]
    (update,) = world.run().updates
    assert update.wait_s == pytest.approx(9)
    assert update.avoidable_s == pytest.approx(7)


def test_upper_limits(scenario: Make) -> None:
    """Four places, a token a second each: 4 tokens/s. Updates of 2 x 5 tokens in 3 s: 10 / 3 tokens/s."""
    setting = scenario()
    found = limits(setting, groups(5, 5))
    assert (found.rollout, found.trainer) == (pytest.approx(4), pytest.approx(10 / 3))
    assert found.smaller == found.trainer


def test_no_policy_beats_the_limits(url: str) -> None:
    for policy in policy_names():
        outcome = simulate(SMALL, policy, 0, url)
        assert outcome.span(2).throughput < outcome.limits.smaller


def test_published_times_rise(url: str) -> None:
    updates = simulate(SMALL, "roq", 0, url).updates
    assert all(a.published < b.published for a, b in pairwise(updates))


# ---- bad input -----------------------------------------------------------------------------------


def test_a_batch_that_no_trace_can_fill(scenario: Make) -> None:
    with pytest.raises(ConfigError, match=r"\b2\b.*\b1\b"):
        World(scenario(), load_policy("roll"), 0, None, groups(5))


def test_a_cache_too_small_for_one_response(scenario: Make) -> None:
    with pytest.raises(ConfigError, match=r"10,000 .*20,001"):
        World(scenario(), load_policy("roll"), 0, None, groups(20_000, 1, 1))


def test_a_cap_that_admits_nothing(scenario: Make) -> None:
    with pytest.raises(ConfigError, match="eta = 0"):
        World(scenario(eta=0), load_policy("trl"), 0, None, groups(1, 1))


def test_a_batch_that_can_never_fill_says_so(scenario: Make) -> None:
    """A policy that stops admitting: the run ends with the reason, it does not hang."""
    world = World(scenario(), load_policy("nemo-in-order"), 0, None, groups(1, 1, 1, 1))
    world._policy.batch = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"nemo-in-order .*batch 0 .*\b4\b"):
        world.run()


def test_roq_needs_a_server(scenario: Make) -> None:
    with pytest.raises(ConfigError, match=r"\broq\b"):
        simulate(scenario(lengths=Lognormal(groups=10, median=10, cap=50)), "roq")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.kv_token=5", "kv_token"),
        ("sync_s=5", "sync_s"),
        ("trainer.sync_s=soon", "trainer.sync_s=soon"),
        ("rollout.contention=1", "contention"),
    ],
)
def test_impossible_coefficients(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(SMALL, [change])
