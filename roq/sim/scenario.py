"""Scenarios: algorithm, machines, costs and lengths, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from roq.config import Positive, RunConfig
from roq.errors import ConfigError
from roq.sim.cost import CostModel
from roq.sim.workload import Lognormal, Workload, load_trace

__all__ = ["Limits", "Scenario", "changed", "limits"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, for any policy and seed.

    Attributes:
        eta: maximum staleness.
        batch_size, group_size, buffer_slots, group_candidates: as in :class:`roq.RunConfig`; the last two are
            roq's alone.
        instances, places: rollout instances, and requests that each holds at once.
        trainer_gpus: GPUs that train.
        cost: the cost model.
        lengths: a distribution, or the path of a trace or event log.
        reprefill: new weights invalidate the KV cache of responses in flight, so it is recomputed.
        batches: updates to simulate.
    """

    cost: CostModel
    eta: Annotated[int, Meta(ge=0, le=100)] = 1
    batch_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    group_size: Annotated[int, Meta(ge=1, le=256)] = 8
    buffer_slots: Positive | None = None
    group_candidates: Positive | None = None
    instances: Positive = 2
    places: Positive = 40
    trainer_gpus: Positive = 6
    lengths: Lognormal | str = Lognormal()
    reprefill: bool = True
    batches: Positive = 10

    @property
    def candidates(self) -> int:
        """Candidates of a group."""
        return self.group_candidates or self.group_size

    def checked(self) -> Scenario:
        """This scenario, every value checked.

        Raises:
            ConfigError: a value is invalid; names it.
        """
        try:
            msgspec.convert(msgspec.structs.asdict(self), Scenario, from_attributes=True)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(str(error).replace(" - at `$.", ": `")) from None
        self.protocol().checked()
        return self

    def protocol(self) -> RunConfig:
        """The run's configuration for roq itself."""
        try:
            return RunConfig(
                eta=self.eta,
                batch_size=self.batch_size,
                group_size=self.group_size,
                buffer_slots=self.buffer_slots,
                group_candidates=self.group_candidates,
                lease_s=86400.0,  # the server's clock is not the simulation's
                event_log=100,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def workload(self, seed: int) -> Workload:
        """The lengths for a seed.

        Raises:
            ConfigError: the trace cannot be used.
        """
        if isinstance(self.lengths, Lognormal):
            return self.lengths.draw(seed, self.candidates)
        return load_trace(self.lengths, self.candidates)

    def suits(self, workload: Workload) -> Workload:
        """The workload, if it can be run at all.

        Raises:
            ConfigError: a batch needs more groups than there are, or the longest response does not fit.
        """
        if len(workload.groups) < self.batch_size:
            raise ConfigError(
                f"a batch of {self.batch_size} groups cannot be filled from a trace of "
                f"{len(workload.groups)}; give a longer trace or a smaller batch"
            )
        if workload.longest > self.cost.rollout.kv_tokens:
            raise ConfigError(
                f"the KV cache of an instance holds {self.cost.rollout.kv_tokens:,} tokens, but the longest "
                f"prompt and response have {workload.longest:,}: it could never finish; raise kv_tokens "
                "(more memory or a larger TP) or cap the lengths"
            )
        return workload


def changed(scenario: Scenario, changes: Sequence[str]) -> Scenario:
    """A scenario with other coefficients, such as ``trainer.sync_s=0`` or ``lengths.sigma=1``.

    Raises:
        ConfigError: there is no such coefficient, or its value is invalid.
    """
    cost: dict[str, dict[str, object]] = msgspec.to_builtins(scenario.cost)
    tables: dict[str, dict[str, object]] = {"rollout": cost["rollout"], "trainer": cost["trainer"]}
    if isinstance(scenario.lengths, Lognormal):
        tables["lengths"] = msgspec.to_builtins(scenario.lengths)
    for change in changes:
        key, _, value = change.partition("=")
        table, _, name = key.partition(".")
        if name not in tables.get(table, {}):
            known = ", ".join(f"{table}.{name}" for table, names in tables.items() for name in names)
            raise ConfigError(f"unknown coefficient in {change!r}; coefficients are {known}")
        tables[table][name] = value
    try:
        return msgspec.structs.replace(
            scenario,
            cost=msgspec.convert(cost, CostModel, strict=False),
            lengths=msgspec.convert(tables["lengths"], Lognormal, strict=False)
            if "lengths" in tables
            else scenario.lengths,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{', '.join(changes)}: {error}") from None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits of the effective throughput, response tokens a second.

    Attributes:
        rollout: all places always in use (as far as the KV cache allows), no prefill, no weight swap.
        trainer: a batch always there.
    """

    rollout: float
    trainer: float

    @property
    def smaller(self) -> float:
        """The one that binds."""
        return min(self.rollout, self.trainer)


def limits(scenario: Scenario, workload: Workload) -> Limits:
    """The upper limits for a workload.

    An instance with ``n`` requests makes ``n / t(n, n * c)`` tokens a second, where ``c`` is the mean context
    of a running request: the step's time is affine in the context, so its mean is that at the mean context.
    """
    cost = scenario.cost
    context = workload.context_mean
    fit = max(1, min(scenario.places, int(cost.rollout.kv_tokens / context)))
    rollout = max(n / cost.rollout.step_s(n, n * context) for n in range(1, fit + 1)) * scenario.instances
    size = scenario.batch_size * scenario.group_size
    update = cost.trainer.train_s(size * workload.tokens_mean, scenario.trainer_gpus)
    update += cost.trainer.sync_s + cost.trainer.turnaround_s
    trainer = size * workload.response_mean / update if update > 0 else float("inf")
    return Limits(rollout=rollout, trainer=trainer)
