"""Each mechanism on a few groups, worked out by hand: a token takes a second, an update three.

Unless it says otherwise: batches of two single trajectories, four places, eta = 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roq.errors import ConfigError
from roq.sim.policies import load_policy, policy_names
from roq.sim.scenario import Scenario
from roq.sim.workload import Workload
from roq.sim.world import World
from tests.sim.conftest import flat, groups

Make = Callable[..., Scenario]


class Played:
    """A run: which ordinals each batch had, when it was published, and what was thrown away."""

    def __init__(self, scenario: Scenario, policy: str, workload: Workload, url: str | None = None) -> None:
        self.world = World(scenario, load_policy(policy), 0, url, workload)
        self.batches: list[list[int]] = []
        inner = self.world._policy.batch

        def batch() -> object:
            found = inner()
            if found is not None:
                self.batches.append([group.ordinal for group in found])
            return found

        self.world._policy.batch = batch  # type: ignore[method-assign]
        self.outcome = self.world.run()

    @property
    def published(self) -> list[float]:
        return [round(update.published, 6) for update in self.outcome.updates]

    @property
    def staleness(self) -> list[dict[int, int]]:
        return [update.staleness for update in self.outcome.updates]

    @property
    def discarded(self) -> list[int]:
        return [group.ordinal for group in self.world.groups if group.state == "discarded"]

    def thrown(self, kind: str) -> float:
        return sum(getattr(update, f"{kind}_tokens") for update in self.outcome.updates)


def test_nemo_in_order(scenario: Make) -> None:
    """Batch 0 waits for its own slow group although two of the next have finished."""
    played = Played(scenario(), "nemo-in-order", groups(1, 6, 2, 2, 1, 1))
    assert played.batches == [[0, 1], [2, 3], [4, 5]]
    # ready at 6, published at 9; the next was there: published at 12; 4 and 5 began at 9
    assert played.published == [9, 12, 15]
    assert played.staleness == [{0: 2}, {1: 2}, {1: 2}]
    assert played.discarded == []


def test_nemo_weight_fifo(scenario: Make) -> None:
    """Any groups of the smallest start version will do: 0, 2 and then 3, 1."""
    played = Played(scenario(), "nemo-weight-fifo", groups(1, 6, 2, 4, 1, 1))
    assert played.batches == [[0, 2], [3, 1], [4, 5]]
    # ready at 2, published at 5, when 4 and 5 begin and 3 is there; 1 at 6: published at 9, then 12
    assert played.published == [5, 9, 12]
    assert played.staleness == [{0: 2}, {1: 2}, {1: 2}]


def test_nemo_weight_fifo_waits_for_older_groups(scenario: Make) -> None:
    """At v1 groups 4 and 5 (v1) have finished, but 1 (v0) has not: the trainer waits for it."""
    played = Played(scenario(places=8), "nemo-weight-fifo", groups(1, 20, 2, 3, 1, 1, 1, 1))
    assert played.batches[:2] == [[0, 2], [3, 1]]
    assert played.outcome.updates[1].wait_s == pytest.approx(15)


def test_verl_drop(scenario: Make) -> None:
    """eta = 0: a group of v0 that ends at v1 is deleted, and a fresh prompt takes its place."""
    played = Played(scenario(eta=0), "verl-drop", groups(1, 1, 4, 9, 2, 2, 3, 3, 3, 3))
    # four at once; 0 and 1 train from 1 to 4. At 4 comes v1: 2 ends in this very moment at v0 or is late;
    # 4 and 5 are submitted for the step. 3 ends at 9, too late: deleted, replaced
    assert played.batches[0] == [0, 1]
    assert 3 in played.discarded
    assert all(set(counts) == {0} for counts in played.staleness)
    assert played.thrown("dropped") == sum(played.world.groups[o].tokens for o in played.discarded)
    assert played.thrown("aborted") == 0
    extra = len(played.world.groups) - 2 * (1 + 1 + played.world.version)
    assert extra <= len(played.discarded)


def test_verl_drop_takes_the_smallest_tags_first(scenario: Make) -> None:
    played = Played(scenario(places=8, batches=2), "verl-drop", groups(2, 1, 6, 4, 1, 1, 9, 9))
    # at the start two batches of v0: 1 and 0 are trained (ready at 2, published at 5); 3 has ended at 4, and
    # 4, 5 of v1 end at 6 together with 2 of v0: the older tags go first
    assert played.batches == [[1, 0], [3, 2]]


def test_trl(scenario: Make) -> None:
    """eta * B * G = 2 samples in flight, for ever; what is too old when it is popped is dropped."""
    setting = scenario(batches=5, cost=flat(train_s=3.25))
    played = Played(setting, "trl", groups(1, 13, *[1] * 20))
    # beside the long 1, one after the other: 0 until 1, 2 until 2, …, n until n. v1 at 5.25, v2 at 8.5: by
    # then 5 and 6 (begun at 4 and 5, at v0) are too old; at v3 9 is (begun at 8, v1); at v4 12 and 1
    assert played.batches == [[0, 2], [3, 4], [7, 8], [10, 11], [13, 14]]
    assert played.published == [5.25, 8.5, 11.75, 15.0, 18.25]
    assert played.discarded == [1, 5, 6, 9, 12]
    assert played.thrown("dropped") == 13 + 4
    assert played.staleness == [{0: 2}, {1: 2}, {1: 2}, {1: 2}, {1: 2}]


def test_trl_admits_samples_not_groups(scenario: Make) -> None:
    """With groups of two and a cap of two samples, the second group begins once one sample has ended."""
    setting = scenario(group_size=2, batch_size=1, batches=1)
    world = World(setting, load_policy("trl"), 0, None, groups((1, 3), (9, 9)))
    world.run()
    assert len(world.groups) == 2
    assert world.groups[1].start == 0


def test_roll_waits_for_the_oldest_step(scenario: Make) -> None:
    """At v1 the quota is 6: 4 and 5 (v1) end first, but 1 (v0) is not finished and is waited for."""
    played = Played(scenario(places=8), "roll", groups(1, 9, 2, 3, 1, 1, 1, 1))
    assert played.batches == [[0, 2], [3, 1], [4, 5]]
    assert played.published == [5, 12, 15]
    assert played.discarded == []


def test_roll_evict_takes_what_there_is_and_aborts_the_rest(scenario: Make) -> None:
    played = Played(scenario(places=8), "roll-evict", groups(1, 30, 2, 3, 1, 1, 1, 1, 1, 1))
    # [0, 2] until 5; then 3 and the first of v1 until 9 (4 ends at 6); then 5 and one more at v2: 1 left the
    # window with v2 at 9 and is cut off after 9 tokens
    assert played.batches[0] == [0, 2]
    assert played.batches[1] == [3, 4]
    assert played.published[:2] == [5, 9]
    assert played.discarded == [1]
    assert played.thrown("aborted") == pytest.approx(9)
    assert played.thrown("dropped") == 0


def test_roq_lets_a_slow_group_go_later(scenario: Make, url: str) -> None:
    """What in_order must wait for until 6 does not hold up batch 0."""
    played = Played(scenario(), "roq", groups(1, 6, 2, 2, 1, 1), url)
    assert sorted(played.batches[0]) == [0, 2] or sorted(played.batches[0]) == [0, 3]
    assert played.published == [5, 9, 12]
    assert played.staleness == [{0: 2}, {1: 2}, {1: 2}]
    assert played.discarded == []


def test_roq_leases_a_group_to_two_instances(scenario: Make, url: str) -> None:
    """Members are leased one by one, wherever a place is free."""
    setting = scenario(group_size=3, batch_size=1, instances=2, places=2, batches=1)
    world = World(setting, load_policy("roq"), 0, url, groups((2, 2, 2), (2, 2, 2)))
    first = world._policy
    seen: dict[int, set[int]] = {}
    inner = first.admit

    def admit(instance: object) -> object:
        samples = inner(instance)  # type: ignore[arg-type]
        for sample in samples:
            seen.setdefault(sample.group.ordinal, set()).add(instance.number)  # type: ignore[attr-defined]
        return samples

    first.admit = admit  # type: ignore[method-assign, assignment]
    world.run()
    assert seen[0] == {0, 1}


def test_roq_over_samples(scenario: Make, url: str) -> None:
    """Two of three candidates make a group: the third is cut off when the second ends."""
    setting = scenario(group_size=2, group_candidates=3, batch_size=1, batches=1, places=3)
    played = Played(setting, "roq", groups((2, 9, 3), (5, 5, 5)), url)
    assert played.published == [6]
    assert played.outcome.updates[0].tokens == 5
    # the third had made 3 tokens at t = 3
    assert played.outcome.updates[0].aborted_tokens == pytest.approx(3)


def test_roq_with_more_slots_than_the_batch(scenario: Make, url: str) -> None:
    """eta = 0, B = 2, S = 3: the first two of three make the batch, the third is discarded."""
    setting = scenario(eta=0, buffer_slots=3, batches=2)
    played = Played(setting, "roq", groups(2, 9, 3, 1, 1, 1, 1), url)
    assert sorted(played.batches[0]) == [0, 2]
    assert played.discarded[0] == 1
    assert played.outcome.updates[0].aborted_tokens == pytest.approx(3)
    assert played.published[0] == 6


def test_all_policies_are_found() -> None:
    assert policy_names() == [
        "roq", "nemo-in-order", "nemo-weight-fifo", "verl-drop", "trl", "roll", "roll-evict",
    ]  # fmt: skip
    assert all(load_policy(name).name == name for name in policy_names())
    with pytest.raises(ConfigError, match="roll-evict"):
        load_policy("roll-evct")
