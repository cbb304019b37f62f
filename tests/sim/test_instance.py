"""One engine: decoding in closed form, prefill, a full KV cache, weights that change."""

from __future__ import annotations

import pytest
import simpy

from roq.sim.cost import RolloutCost, load_cost, shipped_costs
from roq.sim.instance import Group, Instance, Sample
from tests.sim.conftest import flat


class Engine:
    """An instance alone, and when each response ended."""

    def __init__(self, cost: RolloutCost, places: int = 8) -> None:
        self.env = simpy.Environment()
        self.ended: dict[Sample, float] = {}
        self.instance = Instance(self.env, 0, cost, places, self._finished)

    def _finished(self, samples: list[Sample]) -> None:
        self.ended |= dict.fromkeys(samples, self.env.now)

    def add(self, *lengths: int, prompt: int = 1) -> list[Sample]:
        group = Group(0, 0, prompt, lengths)
        self.instance.add(group.samples)
        return group.samples

    def run(self, until: float) -> None:
        self.env.run(until=until)
        self.instance.close()


H20 = load_cost("qwen3-8b-h20").rollout


def test_the_closed_form_is_the_sum_of_the_steps() -> None:
    steps = [H20.step_s(40, 320_000 + 40 * i) for i in range(500)]
    assert H20.decode_s(500, 40, 320_000) == pytest.approx(sum(steps))
    assert H20.steps_in(sum(steps), 40, 320_000) == pytest.approx(500)
    part = H20.decode_s(123.4, 40, 320_000)
    assert part + H20.decode_s(376.6, 40, 320_000 + 40 * 123.4) == pytest.approx(sum(steps))


def test_the_rate_that_the_coefficients_give() -> None:
    """Forty requests of 8,000 tokens: about 1,030 tokens/s an instance."""
    assert 40 / H20.step_s(40, 320_000) == pytest.approx(1035, abs=5)


def test_requests_come_and_go_within_one_decode() -> None:
    """Two tokens a second shared: t = 0.5 n. A of 4 tokens begins, B of 2 joins after one second."""
    engine = Engine(RolloutCost(per_request_s=0.5, kv_tokens=100))
    (a,) = engine.add(4)
    engine.run(1.0)
    (b,) = engine.add(2)
    engine.run(20.0)
    # A has made 2 tokens by t = 1; then both make one a second: both end at t = 3
    assert engine.ended == {a: pytest.approx(3.0), b: pytest.approx(3.0)}
    assert engine.instance.tokens == pytest.approx(6)
    assert engine.instance.place_s == pytest.approx(3 + 2)


def test_prefill_stops_decoding_and_a_group_shares_its_prompt() -> None:
    engine = Engine(flat(prefill_per_token_s=0.1).rollout)
    first, second = engine.add(2, 3, prompt=10)
    engine.run(1.0)
    (late,) = engine.add(1, prompt=5)
    engine.run(20.0)
    # one second for the prompt that both share; then half a second for the late one, at t = 1
    assert engine.ended[late] == pytest.approx(1 + 0.5 + 1)
    assert engine.ended[first] == pytest.approx(1 + 0.5 + 2)
    assert engine.ended[second] == pytest.approx(1 + 0.5 + 3)
    assert engine.instance.stalled_s == pytest.approx(1.5)


def test_new_weights_make_what_is_in_flight_prefill_again() -> None:
    engine = Engine(flat(prefill_per_token_s=0.1).rollout)
    (a,) = engine.add(10, prompt=10)
    engine.run(5.0)  # one second of prefill, four tokens
    engine.instance.refill()
    engine.run(50.0)
    assert engine.ended[a] == pytest.approx(1 + 10 + 0.1 * (10 + 4))


def test_a_full_cache_queues_and_puts_out_the_last_that_came() -> None:
    """20 tokens of cache: two requests of 9 meet it after 9 steps each and one has to begin again."""
    engine = Engine(flat(kv_tokens=20, prefill_per_token_s=0.5).rollout)
    a, b = engine.add(15, 15)
    engine.run(100.0)
    # half a second of prefill (the prompt is shared); 1 + 9 tokens each fill the cache at t = 9.5, b goes;
    # a ends at 15.5; b comes back with 10 tokens to prefill (5 s) and 6 to make
    assert engine.ended[a] == pytest.approx(0.5 + 15)
    assert engine.ended[b] == pytest.approx(15.5 + 5 + 6)
    assert engine.instance.preempted == 1
    assert engine.instance.tokens == pytest.approx(30)


def test_an_aborted_request_keeps_what_it_made() -> None:
    engine = Engine(flat().rollout, places=2)
    a, b = engine.add(5, 9)
    engine.run(3.0)
    engine.instance.abort(a)
    assert a.done == pytest.approx(3)
    assert engine.instance.free == 1
    engine.run(30.0)
    assert engine.ended == {b: pytest.approx(9.0)}


def test_shipped_cost_models_can_be_read() -> None:
    assert {"qwen3-8b-h20", "qwen3-14b-h20"} <= set(shipped_costs())
    for name in shipped_costs():
        assert load_cost(name).rollout.step_s(1, 1000) > 0
