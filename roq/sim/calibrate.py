"""Cost models from real runs: what a run's own events tell of its speed.

Rollout. A response that was under way for ``d`` seconds and has ``L`` tokens took ``L`` decode steps, so

    ``d = latency + load * swaps + admit * a + contention * u
    + L * (base + per_request * n + attention_per_token * C)``

with ``a`` the requests let in on its worker meanwhile, ``u`` the seconds in which the trainer was training,
and ``n`` and ``C`` the means over its steps of the worker's requests and context. This is linear in the
coefficients but for these means, which are over steps and not over time: their weights come from the fit
before, and four rounds settle it. ``load`` is how long after a publication a worker first asked for work with
the new weights, as the median. All coefficients are at least 0: columns that would be negative are left out.

Trainer. The time from taking a batch to publishing is affine in the batch's tokens.

What came before the first publication is left out: it holds the start of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from roq.errors import ConfigError
from roq.sim.cost import CostModel, RolloutCost, TrainerCost
from roq.sim.events import RealRun, Rolled, Update
from roq.sim.scenario import Scenario
from roq.sim.workload import Workload, workload_of_run
from roq.sim.world import simulate

__all__ = ["Fit", "calibrate", "cost_toml", "replay"]

Array = NDArray[np.float64]

ROUNDS = 4
FEWEST = 32  # responses
BURST_S = 0.03  # requests let in so shortly before hold one up as well


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model and how well it explains the run it came from.

    Attributes:
        cost: the model.
        responses, updates: what it was fitted to.
        rollout_error, train_error: mean absolute error of a response's, an update's time, over the mean time.
        real_s, simulated_s: the run's time, and that of its simulation under roq with this model.
        eta, batch_size, group_size, instances, places: the run's settings, as its events show them.
    """

    cost: CostModel
    responses: int
    updates: int
    rollout_error: float
    train_error: float
    real_s: float
    simulated_s: float
    eta: int
    batch_size: int
    group_size: int
    instances: int
    places: int


def calibrate(run: RealRun, name: str, server: str) -> Fit:
    """Fit a cost model to a run, and check it by simulating that run.

    Args:
        run: the run; its event log should be whole.
        name: of the new model.
        server: URL of a server for the simulation.

    Raises:
        ConfigError: too few responses or updates to fit anything.
    """
    later = sum(r.started >= run.updates[0].published for r in run.rolled)
    if later < FEWEST or len(run.updates) < 3:
        raise ConfigError(
            f"{later} responses begun after the first of {len(run.updates)} updates are too few to fit a "
            f"cost model; at least {FEWEST} and 3 are needed"
        )
    rollout, rollout_error = _rollout(run)
    trainer, train_error = _trainer(run)
    cost = CostModel(name=name, rollout=rollout, trainer=trainer)
    return Fit(
        cost=cost,
        responses=later,
        updates=len(run.updates) - 1,
        rollout_error=rollout_error,
        train_error=train_error,
        real_s=run.seconds,
        simulated_s=replay(run, cost, server),
        eta=run.eta,
        batch_size=run.batch_size,
        group_size=run.group_size,
        instances=len(run.workers),
        places=run.concurrency,
    )


def replay(run: RealRun, cost: CostModel, server: str) -> float:
    """Simulated seconds from the first publication to the last: a run's settings and lengths, under roq."""
    scenario = Scenario(
        cost=cost,
        eta=run.eta,
        batch_size=run.batch_size,
        group_size=run.group_size,
        instances=len(run.workers),
        places=run.concurrency,
        trainer_gpus=1,
        batches=len(run.updates),
        reprefill=False,  # part of the load time that was seen
    )
    outcome = simulate(scenario, "roq", server=server, workload=lengths(run))
    return outcome.seconds - outcome.updates[0].published


def lengths(run: RealRun) -> Workload:
    """The run's own lengths."""
    return workload_of_run(run, run.group_size, "of the run")


# ---- rollout -----------------------------------------------------------------------------------


class _Timeline:
    """One worker's requests: integrals over time of what runs on it, weighted by its decode speed."""

    def __init__(self, rolled: Sequence[Rolled], prompt: float) -> None:
        start = np.array([r.started for r in rolled])
        end = np.array([max(r.finished, r.started + 1e-3) for r in rolled])
        tokens = np.array([r.tokens for r in rolled], dtype=float)
        self.start, self.end, self.tokens = start, end, tokens
        speed = tokens / (end - start)
        order = np.argsort(np.concatenate([start, end]), kind="stable")
        self.times = np.concatenate([start, end])[order]
        # a request's context is taken to grow evenly: c(t) = prompt + speed * (t - start)
        running = np.cumsum(np.concatenate([np.ones_like(start), -np.ones_like(end)])[order])[:-1]
        slope = np.cumsum(np.concatenate([speed, -speed])[order])[:-1]
        offset = np.cumsum(np.concatenate([prompt - speed * start, speed * start - prompt])[order])[:-1]
        arrivals = np.sort(start)
        let_in = np.searchsorted(arrivals, end) - np.searchsorted(arrivals, start - BURST_S)
        self.let_in: Array = let_in.astype(np.float64)
        self.gaps = np.diff(self.times)
        self.running: Array = running
        self.context: Array = offset + slope * (self.times[:-1] + self.gaps / 2)

    def means(self, step_s: Array) -> tuple[Array, Array]:
        """Means over steps of requests and context during each response, for step times in each gap."""
        steps = self.gaps / step_s
        total, running, context = (
            np.concatenate([[0.0], np.cumsum(steps * values)])
            for values in (np.ones_like(steps), self.running, self.context)
        )
        first, last = np.searchsorted(self.times, self.start), np.searchsorted(self.times, self.end)
        weight = np.maximum(total[last] - total[first], 1e-12)
        return (running[last] - running[first]) / weight, (context[last] - context[first]) / weight


def _overlap(start: Array, end: Array, updates: Sequence[Update]) -> Array:
    """Seconds of each span in which the trainer was training."""
    edges = np.array([edge for update in updates for edge in (update.taken, update.published)])
    sums = np.concatenate(
        [[0.0], np.cumsum([update.published - update.taken for update in updates])]
    )  # up to each update's end

    def until(at: Array) -> Array:
        index = np.searchsorted(edges, at)
        done = sums[index // 2]
        inside = index % 2 == 1
        return done + np.where(inside, at - edges[np.minimum(index - 1, len(edges) - 1)], 0.0)

    return until(end) - until(start)


def _rollout(run: RealRun) -> tuple[RolloutCost, float]:
    rolled = [response for response in run.rolled if response.started >= run.updates[0].published]
    load_s = median(run.loads) if run.loads else 0.0
    timelines = [
        _Timeline([r for r in rolled if r.worker == worker], run.prompt_mean)
        for worker in sorted({r.worker for r in rolled})
    ]
    start = np.concatenate([timeline.start for timeline in timelines])
    end = np.concatenate([timeline.end for timeline in timelines])
    tokens = np.concatenate([timeline.tokens for timeline in timelines])
    let_in = np.concatenate([timeline.let_in for timeline in timelines])
    published = np.array([update.published for update in run.updates])
    swaps = np.searchsorted(published, end) - np.searchsorted(published, start)
    seconds: Array = np.asarray(end - start - load_s * swaps, dtype=np.float64)
    overlap = _overlap(start, end, run.updates)
    base, per_request, attention = float(np.sum(seconds) / np.sum(tokens)), 0.0, 0.0
    weights = columns = np.zeros(0)
    for _ in range(ROUNDS):
        means = [
            timeline.means(
                base + per_request * np.maximum(timeline.running, 1) + attention * timeline.context
            )
            for timeline in timelines
        ]
        running = np.concatenate([mean[0] for mean in means])
        context = np.concatenate([mean[1] for mean in means])
        columns = np.stack(
            [np.ones_like(tokens), tokens, tokens * running, tokens * context, overlap, let_in], axis=1
        )
        weights = _nonnegative(columns, seconds)
        if weights[1] + weights[2] <= 0:  # context and requests rise together: take the requests
            columns[:, 3] = 0.0
            weights = _nonnegative(columns, seconds)
        base, per_request, attention = (float(weight) for weight in weights[1:4])
        if base + per_request <= 0:
            raise ConfigError("the events show no time for decoding; is this the event log of a real run?")
    error = float(np.mean(np.abs(columns @ weights - seconds)) / np.mean(seconds))
    longest = max(r.tokens for r in run.rolled) + round(run.prompt_mean)
    cost = RolloutCost(
        base_s=base,
        per_request_s=per_request,
        attention_per_token_s=attention,
        latency_s=float(weights[0]),
        load_s=load_s,
        contention=min(0.99, float(weights[4])),
        admit_s=float(weights[5]),
        kv_tokens=longest * run.concurrency,  # never short of it: the events do not tell
    )
    return cost, error


def _trainer(run: RealRun) -> tuple[TrainerCost, float]:
    updates = run.updates[1:]
    tokens = np.array([update.response_tokens + update.prompt_tokens for update in updates])
    seconds = np.array([update.published - update.taken for update in updates])
    columns = np.stack([np.ones_like(tokens), tokens], axis=1)
    weights = _nonnegative(columns, seconds)
    error = float(np.mean(np.abs(columns @ weights - seconds)) / np.mean(seconds))
    held = [
        after.taken - before.published
        for before, after in zip(run.updates, run.updates[1:], strict=False)
        if after.ready <= before.published
    ]
    cost = TrainerCost(
        fixed_s=float(weights[0]),
        gpu_s_per_token=float(weights[1]),
        turnaround_s=max(0.0, fmean(held)) if held else 0.0,
    )
    return cost, error


def _nonnegative(columns: Array, values: Array) -> Array:
    """Least squares without negative weights: the worst column goes until none is negative."""
    kept = list(range(columns.shape[1]))
    while kept:
        found: Any = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0]
        if found.min() >= 0:
            weights: Array = np.zeros(columns.shape[1])
            weights[kept] = found
            return weights
        del kept[int(found.argmin())]
    return np.zeros(columns.shape[1])


def cost_toml(cost: CostModel, source: str) -> str:
    """A cost model as the text of its file."""
    lines = [f"# {source}", "", f"name = {msgspec.json.encode(cost.name).decode()}"]
    for title, part in (("rollout", cost.rollout), ("trainer", cost.trainer)):
        lines += ["", f"[{title}]"]
        values: dict[str, float] = msgspec.structs.asdict(part)
        lines += [
            f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}"
            for key, value in values.items()
        ]
    return "\n".join([*lines, ""])
