"""Cost models from event logs: of real runs of the example job, and of a simulated one of known costs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from roq.errors import ConfigError
from roq.events.archive import read_archive
from roq.events.event import Event
from roq.sim.calibrate import calibrate, cost_toml
from roq.sim.cost import CostModel, RolloutCost, TrainerCost
from roq.sim.events import RealRun, Rolled, Update
from roq.sim.policies import load_policy
from roq.sim.scenario import Scenario
from roq.sim.workload import Lognormal, load_trace
from roq.sim.world import World

DATA = Path(__file__).with_name("data")


@pytest.mark.parametrize("name", ["gcd-eta1", "gcd-eta3"])
def test_the_example_job_on_two_cores(name: str, url: str) -> None:
    """``roq up examples/gcd.toml`` as it is, and with eta = 3 and 32 places: within 15% of the real time."""
    run = RealRun.replay(read_archive(DATA / f"{name}.jsonl.gz"))
    fit = calibrate(run, name, url)
    assert (fit.eta, fit.batch_size, fit.group_size, fit.instances) == (int(name[-1]), 16, 8, 2)
    assert len(run.updates) == 48
    assert fit.simulated_s == pytest.approx(fit.real_s, rel=0.15)


def test_the_events_are_read_as_they_are() -> None:
    run = RealRun.replay(read_archive(DATA / "gcd-eta1.jsonl.gz"))
    assert run.concurrency == 64
    assert run.prompt_mean == 25
    assert sum(update.response_tokens for update in run.updates[:2]) == 991 + 791
    assert len(run.rolled) == 48 * 16 * 8
    assert all(r.finished > r.started for r in run.rolled)


@pytest.mark.parametrize(
    "end",
    [
        {"event": "cancelled", "group": "2", "members": "1"},
        {"event": "release", "group": "2", "member": "1", "worker": "w1"},
        {"event": "expired", "group": "2", "member": "1", "worker": "w1"},
        {"event": "requeued", "group": "2", "ordinal": "1"},
        {"event": "discarded", "group": "2", "ordinal": "1"},
        {"event": "filtered", "group": "2", "ordinal": "1"},
        {"event": "dead", "group": "2", "ordinal": "1"},
    ],
    ids=lambda end: end["event"],
)
def test_a_worker_whose_claim_has_ended_is_idle(end: dict[str, str]) -> None:
    """It shows when the next version is published: nothing was in its way to load the last one."""
    claim = {"event": "reserve", "members": "1", "v_traj": "0"}
    told = [
        claim | {"group": "1", "ordinal": "0", "at": "0.1", "worker": "w0"},
        claim | {"group": "2", "ordinal": "1", "at": "1.1", "worker": "w1"},
        claim | {"group": "3", "ordinal": "2", "at": "1.2", "worker": "gone"},
        {"event": "complete", "group": "1", "member": "1", "worker": "w0", "tokens": "5", "reward": "0"},
        {"event": "occupy", "group": "1", "ordinal": "0", "at": "0.1", "v_traj": "0"},
        {"event": "take", "version": "0", "groups": "1"},
        {"event": "publish", "version": "1"},
        end,
        {"event": "expired", "group": "3", "member": "1", "worker": "gone"},
        {"event": "worker_lost", "worker": "gone"},
        {"event": "publish", "version": "2"},
    ]
    run = RealRun.replay(Event(f"{time}000-0", fields) for time, fields in enumerate(told))
    assert run.loads == [4.0, 4.0]  # w0 and w1


def test_known_costs_are_found_again(url: str) -> None:
    """A simulated run, seen as events would show it, gives back the coefficients it was made with."""
    rollout = RolloutCost(base_s=0.01, per_request_s=1e-3, latency_s=0.5, kv_tokens=10**6)
    cost = CostModel(
        name="known",
        rollout=rollout,
        trainer=TrainerCost(fixed_s=4.0, gpu_s_per_token=2e-4, turnaround_s=1.0),
    )
    setting = Scenario(
        cost=cost, eta=2, batch_size=8, group_size=4, instances=2, places=24, trainer_gpus=1,
        reprefill=False, batches=30,
        lengths=Lognormal(groups=400, median=300, prompt_sigma=0.0, prompt_median=20),
    )  # fmt: skip
    run = observed(World(setting, load_policy("roq"), 0, url), setting)
    fit = calibrate(run, "found", url)
    found = fit.cost
    for running in (8, 16, 24):
        context = running * 200
        step = rollout.step_s(running, context)
        assert found.rollout.step_s(running, context) == pytest.approx(step, rel=0.06)
    assert found.rollout.latency_s == pytest.approx(0.5, abs=0.25)
    assert found.rollout.contention < 0.1
    assert found.trainer.fixed_s == pytest.approx(4.0, rel=0.05)
    assert found.trainer.gpu_s_per_token == pytest.approx(2e-4, rel=0.05)
    assert fit.simulated_s == pytest.approx(fit.real_s, rel=0.05)


def observed(world: World, setting: Scenario) -> RealRun:
    """Run a world and note what an event log would."""
    started: dict[object, tuple[float, int]] = {}
    rolled: list[Rolled] = []
    updates: list[Update] = []
    policy = world._policy
    admit, finish, batch, published = policy.admit, policy.finish, policy.batch, policy.published

    def on_admit(instance):  # type: ignore[no-untyped-def]
        samples = admit(instance)
        started.update((sample, (world.now, instance.number)) for sample in samples)
        return samples

    def on_finish(samples):  # type: ignore[no-untyped-def]
        for sample in samples:
            begun, number = started.pop(sample)
            rolled.append(
                Rolled(
                    ordinal=sample.group.ordinal, member=sample.group.samples.index(sample) + 1,
                    worker=f"w{number}", started=begun, finished=world.now, tokens=sample.length,
                )
            )  # fmt: skip
        finish(samples)

    def on_batch():  # type: ignore[no-untyped-def]
        groups = batch()
        if groups is not None:
            updates.append(
                Update(
                    version=world.version + 1, ready=world.now, taken=world.now, published=0.0,
                    response_tokens=int(sum(group.tokens for group in groups)),
                    prompt_tokens=sum(group.prompt * len(group.samples) for group in groups),
                    trajectories=sum(len(group.samples) for group in groups),
                )
            )  # fmt: skip
        return groups

    def on_published() -> None:
        updates[-1].published = world.now
        published()

    policy.admit, policy.finish = on_admit, on_finish  # type: ignore[method-assign]
    policy.batch, policy.published = on_batch, on_published  # type: ignore[method-assign]
    world.run()
    return RealRun(
        rolled=rolled, updates=updates, loads=[], eta=setting.eta, batch_size=setting.batch_size,
        group_size=setting.group_size, started=0.0,
    )  # fmt: skip


def test_a_fitted_model_can_be_written_and_read() -> None:
    cost = CostModel(
        name='a "name"',
        rollout=RolloutCost(base_s=0.0123456, kv_tokens=5000),
        trainer=TrainerCost(fixed_s=1.5),
    )
    text = cost_toml(cost, "by hand")
    assert text.startswith("# by hand\n")
    assert msgspec.convert(tomllib.loads(text), CostModel) == cost


def test_a_log_without_training_teaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"id": "1-0", "event": "created"}\n{"id": "2-0", "event": "news"}\n')
    with pytest.raises(ConfigError, match="published"):
        RealRun.replay(read_archive(tmp_path / "e.jsonl"))


def test_too_short_a_run(url: str) -> None:
    run = RealRun.replay(read_archive(DATA / "gcd-eta1.jsonl.gz"))
    with pytest.raises(ConfigError, match=r"\b2\b.*\b3\b"):
        calibrate(msgspec.structs.replace(run, updates=run.updates[:2]), "short", url)


def test_an_event_log_is_a_workload(tmp_path: Path) -> None:
    """The lengths of the first groups are those of the run, in its order."""
    workload = load_trace(DATA / "gcd-eta1.jsonl.gz", 8)
    run = RealRun.replay(read_archive(DATA / "gcd-eta1.jsonl.gz"))
    assert len(workload.groups) == 48 * 16
    assert workload[0].responses == tuple(run.lengths()[0])
    assert workload[0].prompt == 25
    with pytest.raises(ConfigError, match=r"\b8\b.*\b9\b"):
        load_trace(DATA / "gcd-eta1.jsonl.gz", 9)
