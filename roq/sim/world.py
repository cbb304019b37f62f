"""One run in virtual time: instances, a trainer, and a policy that decides what is generated and trained.

The order at one moment: responses that end are handed to the policy; if the trainer waits and the policy
has a batch, training starts; then free capacity is offered to the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator
from typing import Any, ClassVar

import simpy

from roq.errors import ConfigError
from roq.sim.instance import Group, Instance, Sample
from roq.sim.outcome import Outcome, Update
from roq.sim.scenario import Scenario, limits
from roq.sim.workload import Workload

__all__ = ["Policy", "World"]


class Policy(ABC):
    """A staleness mechanism. ``name`` is the file's name with ``-`` for ``_``."""

    name: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        scenario = world.scenario
        self.check(scenario)
        self.eta = scenario.eta
        self.batch_size = scenario.batch_size
        self.group_size = scenario.group_size

    @classmethod  # noqa: B027 - most can fill any batch
    def check(cls, scenario: Scenario) -> None:
        """Refuse (ConfigError) a scenario in which this mechanism can never fill a batch."""

    @abstractmethod
    def admit(self, instance: Instance) -> list[Sample]:
        """Return responses to start on this instance, up to its capacity; called until there are none."""

    @abstractmethod
    def finish(self, samples: list[Sample]) -> None:
        """These responses have ended."""

    @abstractmethod
    def batch(self) -> list[Group] | None:
        """The trainer is idle: the groups to train at this version, or None while it must wait."""

    def published(self) -> None:  # noqa: B027 - most need nothing more than this
        """The version has risen by one."""

    def loaded(self, instance: Instance) -> None:  # noqa: B027
        """The instance serves new weights."""

    def batch_possible(self) -> bool:
        """Whether some legal placement of what is finished would make a batch; roq alone can say."""
        return False

    def close(self) -> None:  # noqa: B027
        """The run is over."""


class World:
    """The simulation, as policies see it.

    Attributes:
        scenario: what is simulated.
        version: completed updates.
        server: URL of the server for the policy that needs one.
        instances: the rollout instances.
        groups: every group that was ever admitted, by ordinal.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: type[Policy],
        seed: int,
        server: str | None = None,
        workload: Workload | None = None,
    ) -> None:
        self.scenario = scenario
        self.server = server
        self.version = 0
        self.groups: list[Group] = []
        self._workload = scenario.suits(workload or scenario.workload(seed))
        self._seed = seed
        self._env = simpy.Environment()
        self._updates: list[Update] = []
        self._aborted = self._dropped = 0.0  # tokens since the last update
        self._waiting: simpy.Event | None = None
        self._possible_since: float | None = None
        self._avoidable = 0.0
        self.instances = [
            Instance(self._env, number, scenario.cost.rollout, scenario.places, self._finished)
            for number in range(scenario.instances)
        ]
        self._policy = policy(self)

    # -- for policies -------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._env.now

    def new_group(self, start: int, size: int | None = None) -> Group:
        """Admit the next prompt of the order, at version ``start``, with ``size`` responses (default: G)."""
        ordinal = len(self.groups)
        lengths = self._workload[ordinal]
        size = size or self.scenario.group_size
        group = Group(ordinal, start, lengths.prompt, lengths.responses[:size])
        self.groups.append(group)
        return group

    def abort(self, sample: Sample) -> None:
        """Stop a response that is being generated; its tokens so far count as cut off (L2)."""
        if sample.instance is not None:
            sample.instance.abort(sample)
        self._aborted += sample.done
        sample.done = 0.0  # counted

    def discard(self, group: Group) -> None:
        """Take a group out for good: its finished responses count as dropped (L3), the others as cut off."""
        group.state = "discarded"
        for sample in group.samples:
            if sample.finished:
                self._dropped += sample.length
            else:
                self.abort(sample)

    # -- events -------------------------------------------------------------------------------------

    def _finished(self, samples: list[Sample]) -> None:
        self._policy.finish(samples)
        self._go_on()

    def _go_on(self) -> None:
        """After any event: give the trainer its batch, then fill free capacity."""
        if self._waiting is not None and not self._waiting.triggered:
            batch = self._policy.batch()
            if batch is not None:
                self._waiting.succeed(batch)
        self._fill()
        self._note_possible()

    def _fill(self) -> None:
        refused: set[int] = set()
        while True:
            open_to = [i for i in self.instances if i.free > 0 and i.number not in refused]
            if not open_to:
                return
            instance = max(open_to, key=lambda i: i.free)
            samples = self._policy.admit(instance)
            if samples:
                instance.add(samples)
            else:
                refused.add(instance.number)

    def _note_possible(self) -> None:
        """Add up the time in which the trainer waits although a legal placement would have a batch."""
        if self._possible_since is not None:
            self._avoidable += self._env.now - self._possible_since
        waits = self._waiting is not None and not self._waiting.triggered
        self._possible_since = self._env.now if waits and self._policy.batch_possible() else None

    def _train(self) -> Generator[simpy.Event, Any, None]:
        cost, scenario = self.scenario.cost.trainer, self.scenario
        while self.version < scenario.batches:
            begun = self._env.now
            batch = self._policy.batch()
            if batch is None:
                self._waiting = self._env.event()
                self._note_possible()
                batch = yield self._waiting
                self._waiting = None
            self._note_possible()
            update = self._update(batch, self._env.now - begun)
            prompts = sum(group.prompt * scenario.group_size for group in batch)
            self._fill()  # with over-sampling, taking a batch may make room
            for instance in self.instances:
                instance.slow_down(scenario.cost.rollout.contention)
            yield self._env.timeout(cost.train_s(update.tokens + prompts, scenario.trainer_gpus))
            for instance in self.instances:
                instance.slow_down(0.0)
                instance.pause(cost.sync_s)
            yield self._env.timeout(cost.sync_s)
            self._publish(update)
            yield self._env.timeout(cost.turnaround_s)

    def _update(self, batch: list[Group], waited: float) -> Update:
        update = Update(version=self.version, wait_s=waited, avoidable_s=self._avoidable)
        self._avoidable = 0.0
        staleness: Counter[int] = Counter()
        for group in batch:
            group.state = "trained"
            staleness[self.version - group.start] += self.scenario.group_size
        update.staleness = dict(sorted(staleness.items()))
        update.tokens = sum(group.tokens for group in batch)
        return update

    def _publish(self, update: Update) -> None:
        self.version += 1
        self._policy.published()
        update.published = self._env.now
        update.aborted_tokens, update.dropped_tokens = self._aborted, self._dropped
        self._aborted = self._dropped = 0.0
        for instance in self.instances:
            instance.close()
        update.place_s = sum(instance.place_s for instance in self.instances)
        self._updates.append(update)
        for instance in self.instances:
            self._env.process(self._load(instance, self.version))

    def _load(self, instance: Instance, version: int) -> Generator[simpy.Event, Any, None]:
        instance.pause(self.scenario.cost.rollout.load_s)
        yield self._env.timeout(self.scenario.cost.rollout.load_s)
        instance.version = max(instance.version, version)
        if self.scenario.reprefill:
            instance.refill()
        self._policy.loaded(instance)
        self._go_on()

    # -- running ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the last update."""
        self._fill()
        trainer = self._env.process(self._train())
        try:
            self._env.run(until=trainer)
        except RuntimeError:
            # simpy: nothing is scheduled, but the trainer is still waiting
            states = Counter(group.state for group in self.groups)
            known = ", ".join(f"{n} groups {state}" for state, n in sorted(states.items()))
            raise ConfigError(
                f"{self._policy.name} can never fill batch {self.version} with eta = {self.scenario.eta}, "
                f"batches of {self.scenario.batch_size} groups of {self.scenario.group_size}: nothing is "
                f"being generated ({known or 'no group was admitted'})"
            ) from None
        finally:
            self._policy.close()
        return self._outcome()

    def _outcome(self) -> Outcome:
        for instance in self.instances:
            instance.close()
        running = sum(
            sample.instance.progress(sample) if sample.instance else sample.done
            for group in self.groups
            if group.state == "running"
            for sample in group.samples
        )
        return Outcome(
            policy=self._policy.name,
            eta=self.scenario.eta,
            seed=self._seed,
            places=self.scenario.places * self.scenario.instances,
            updates=self._updates,
            groups=dict(Counter(group.state for group in self.groups)),
            limits=limits(self.scenario, self._workload),
            assumed=self._workload.assumed,
            generated_tokens=sum(instance.tokens for instance in self.instances),
            unfinished_tokens=running,
            waiting_tokens=sum(group.tokens for group in self.groups if group.state == "waiting"),
            prefilled_tokens=sum(instance.prefilled for instance in self.instances),
            stalled=sum(i.stalled_s for i in self.instances) / len(self.instances) / self._env.now,
            preempted=sum(instance.preempted for instance in self.instances),
        )
