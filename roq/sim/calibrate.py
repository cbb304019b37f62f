"""Fit cost models to real runs, from their events.

Rollout. A response that was under way for ``d`` seconds and has ``L`` tokens took ``L`` decode steps, so

    ``d = latency + load * swaps + admit * a + contention * u
    + L * (base + per_request * n + attention_per_token * C)``

with ``a`` the requests admitted on its worker then, ``u`` the seconds in which the trainer was training,
and ``n`` and ``C`` the means over its steps of the worker's requests and context. This is linear in the
coefficients but for these means, which are over steps and not over time: their weights come from the fit
before, and four rounds settle it. ``load`` is how long after a publication a worker first asked for work with
the new weights, as the median. All coefficients are at least 0: columns that would be negative are left out.

Trainer. The time from taking a batch to publishing is affine in the batch's tokens.

Everything before the first publication is left out: it includes the engines' startup.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec
import numpy as np
from numpy.typing import NDArray

from roq.errors import ConfigError
from roq.sim.cost import CostModel, RolloutCost, TrainerCost
from roq.sim.events import RealRun, Rolled, Update
from roq.sim.runs import simulate
from roq.sim.scenario import Scenario
from roq.sim.workload import Workload, workload_of_run

__all__ = ["Fit", "calibrate", "cost_toml", "replay"]

Array = NDArray[np.float64]

ROUNDS = 4
FEWEST = 32  # responses
BURST_S = 0.03  # requests admitted this shortly before also delay one


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model and how well it fits its run.

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
        run: the run; its event log should be complete.
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


class _Requests:
    """One worker's requests, and means over what else runs on it during each."""

    def __init__(self, rolled: Sequence[Rolled], prompt: float) -> None:
        self.prompt = prompt
        self.start: Array = np.array([r.started for r in rolled])
        self.end: Array = np.array([max(r.finished, r.started + 1e-3) for r in rolled])
        self.tokens: Array = np.array([float(r.tokens) for r in rolled])
        arrivals = np.sort(self.start)
        let_in = np.searchsorted(arrivals, self.end) - np.searchsorted(arrivals, self.start - BURST_S)
        self.let_in: Array = let_in.astype(np.float64)

    def means(self, cost: RolloutCost) -> tuple[Array, Array]:
        """Means over the decode steps of each request: requests running, and their context in all."""
        start, end = self.start, np.maximum(self.end - cost.latency_s, self.start + 1e-3)
        order = np.argsort(np.concatenate([start, end]), kind="stable")
        times = np.concatenate([start, end])[order]
        gaps = np.diff(times)
        # a request's context is taken to grow evenly: c(t) = prompt + speed * (t - start)
        speed = self.tokens / (end - start)
        first = self.prompt - speed * start

        def total(change: Array) -> Array:
            return np.cumsum(np.concatenate([change, -change])[order])[:-1]

        running = total(np.ones_like(start))
        context = total(first) + total(speed) * (times[:-1] + gaps / 2)
        # a request alone has the step's least time; where nothing runs nothing is counted
        steps = gaps / np.array(
            [cost.step_s(max(1, round(n)), max(0.0, c)) for n, c in zip(running, context, strict=True)]
        )
        begun, ended = np.searchsorted(times, start), np.searchsorted(times, end)

        def over(values: Array) -> Array:
            sums = np.concatenate([[0.0], np.cumsum(steps * values)])
            return sums[ended] - sums[begun]

        count = np.maximum(over(np.ones_like(steps)), 1e-12)
        return over(running) / count, over(context) / count


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
    workers = [
        _Requests([r for r in run.rolled if r.worker == worker], run.prompt_mean) for worker in run.workers
    ]
    start, end = _all([w.start for w in workers]), _all([w.end for w in workers])
    counted = start >= run.updates[0].published
    tokens, let_in = _all([w.tokens for w in workers]), _all([w.let_in for w in workers])
    load_s = median(run.loads) if run.loads else 0.0
    published = np.array([update.published for update in run.updates])
    swaps = (np.searchsorted(published, end) - np.searchsorted(published, start)).astype(np.float64)
    seconds: Array = end - start - load_s * swaps
    overlap = _overlap(start, end, run.updates)
    longest = max(r.tokens for r in run.rolled) + round(run.prompt_mean)
    room = longest * run.concurrency  # the events do not show the cache's size: assume it is never full
    cost = RolloutCost(base_s=float(np.mean(end - start) / np.mean(tokens)), kv_tokens=room)
    error = 0.0
    for _ in range(ROUNDS):
        means = [worker.means(cost) for worker in workers]
        running, context = _all([mean[0] for mean in means]), _all([mean[1] for mean in means])
        columns = np.stack(
            [np.ones_like(tokens), tokens, tokens * running, tokens * context, overlap, let_in], axis=1
        )
        columns, spent = columns[counted], seconds[counted]
        weights = _nonnegative(columns, spent)
        if weights[1] + weights[2] <= 0:  # context and requests rise together: take the requests
            columns[:, 3] = 0.0
            weights = _nonnegative(columns, spent)
        if weights[1] + weights[2] <= 0:
            raise ConfigError("the events show no time for decoding; is this the event log of a real run?")
        error = float(np.mean(np.abs(columns @ weights - spent)) / np.mean(spent))
        latency, base, per_request, attention, contention, admit = (float(weight) for weight in weights)
        cost = RolloutCost(
            base_s=base,
            per_request_s=per_request,
            attention_per_token_s=attention,
            admit_s=admit,
            latency_s=latency,
            load_s=load_s,
            contention=min(0.99, contention),
            kv_tokens=room,
        )
    return cost, error


def _all(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts)


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
    """Non-negative least squares: drop the most negative column until none is negative."""
    weights = np.zeros(columns.shape[1])
    kept = [column for column in range(columns.shape[1]) if columns[:, column].any()]
    while kept:
        found = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0].astype(np.float64)
        if found.min() >= 0:
            weights[kept] = found
            break
        del kept[int(found.argmin())]
    return weights


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
