"""roq itself: the shipped Lua library, on a real server.

Each instance is a worker of the run. It reserves up to its free capacity with the weights version that it
serves, never ahead. After a refusal it asks again once something has changed, like a worker that sleeps on
the run's signal. Payloads are as short as possible, because their lengths are known here.
"""

from __future__ import annotations

import uuid
from functools import cache
from typing import TYPE_CHECKING

from roq.client import Scheduler
from roq.errors import ConfigError, Refused, RoqError
from roq.events.event import BEGINNING
from roq.events.follow import read_events
from roq.sim.bound import batch_possible
from roq.sim.instance import Group, Instance, Sample
from roq.sim.world import Policy
from roq.trajectory import Trajectory
from roq.types import Reservation

if TYPE_CHECKING:
    from roq.sim.world import World

__all__ = ["POLICY"]

TRAINER = "trainer"


class Roq(Policy):
    """Calls the scheduler as workers and a trainer would."""

    name = "roq"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        if world.server is None:
            raise ConfigError("the policy roq needs a server; give its URL")
        self.config = world.scenario.protocol()
        self.run = f"sim-{uuid.uuid4().hex}"
        self.scheduler = Scheduler(world.server, self.run)
        self.scheduler.create(self.config)
        self.oversampling = self.config.slots > self.batch_size or self.config.candidates > self.group_size
        self._groups: dict[int, Group] = {}  # by the library's number
        self._live: dict[Group, int] = {}
        self._claims: dict[Sample, Reservation] = {}
        self._versions: dict[Sample, int] = {}  # of the weights that a response began with
        self._samples: dict[tuple[int, int, int], Sample] = {}
        self._refused: set[Instance] = set()
        self._ready: set[int] = set()
        self._seen = BEGINNING

    def admit(self, instance: Instance) -> list[Sample]:
        """Reserve for the free capacity."""
        if instance in self._refused:
            return []
        grant = self.scheduler.reserve(worker(instance), instance.version, instance.free)
        if grant.refused:
            self._refused.add(instance)
        return [self._start(claim, instance.version) for claim in grant.reservations]

    def _start(self, claim: Reservation, version: int) -> Sample:
        group = self._groups.get(claim.group)
        if group is None:
            group = self.world.new_group(claim.v_traj, self.config.candidates)
            if group.ordinal != claim.ordinal:
                raise RoqError(f"the library issued prompt {claim.ordinal}, expected {group.ordinal}")
            self._groups[claim.group] = group
            self._live[group] = claim.group
        group.start = claim.v_traj
        sample = group.samples[claim.member - 1]
        self._claims[sample] = claim
        self._versions[sample] = version
        self._samples[claim.group, claim.member, claim.token] = sample
        return sample

    def finish(self, samples: list[Sample]) -> None:
        """Complete the claims; several that end at one moment go together."""
        finished = [(self._forget(sample), payload(self._versions.pop(sample))) for sample in samples]
        if len(finished) == 1:
            answers = [self.scheduler.complete(*finished[0])]
        else:
            answers = self.scheduler.complete_many(finished)
        for sample, answer in zip(samples, answers, strict=True):
            if isinstance(answer, Refused):  # superfluous since another of this moment was handed in
                sample.finished = False
                self.world.abort(sample)
            elif answer.status == "occupied":
                sample.group.state = "waiting"
                if answer.ready is not None:
                    self._ready.add(answer.ready)
            elif answer.status == "surplus":
                self._discard(sample.group)
        if self.oversampling:
            self._follow_cancellations()

    def _forget(self, sample: Sample) -> Reservation:
        claim = self._claims.pop(sample)
        del self._samples[claim.group, claim.member, claim.token]
        return claim

    def batch(self) -> list[Group] | None:
        """Take, when the frontier's buffer has become READY."""
        if self.world.version not in self._ready and not self.oversampling:
            return None
        batch = self.scheduler.take(TRAINER)
        if batch is None:
            return None
        self._ready.discard(batch.version)
        groups = [self._groups.pop(group.group) for group in batch.groups]
        for group, trained in zip(groups, batch.groups, strict=True):
            group.start = trained.v_traj
            del self._live[group]
        if self.oversampling:
            self._follow_cancellations()
        return groups

    def published(self) -> None:
        """Publish, and let go of what was trained."""
        self.scheduler.publish(self.world.version, "nowhere", TRAINER)
        self.scheduler.checkpointed(self.world.version, TRAINER)

    def loaded(self, instance: Instance) -> None:
        """Newer weights may reserve where older ones may not."""
        self._refused.discard(instance)

    def batch_possible(self) -> bool:
        """Whether what is finished could make a batch, whatever the rule of placement."""
        finished = [group.start for group in self._live if group.state == "waiting"]
        running = [group.start for group in self._live if group.state == "running"]
        return batch_possible(
            finished, running, self.world.version, self.eta, self.batch_size, self.config.slots
        )

    def close(self) -> None:
        """Close the connection; the run stays on the server."""
        self.scheduler.close()

    # -- over-sampling ------------------------------------------------------------------------------

    def _follow_cancellations(self) -> None:
        """Stop the responses that the library has cancelled, and free their capacity."""
        for instance in self.world.instances:
            for claim in self.scheduler.renew(worker(instance), instance.version).cancelled:
                sample = self._samples.get((claim.group, claim.member, claim.token))
                if sample is not None:
                    self._forget(sample)
                    self.world.abort(sample)
        for event in read_events(self.scheduler, self._seen):
            self._seen = event.id
            if event.name == "discarded" and event.number("group") in self._groups:
                self._discard(self._groups[event.number("group")])
        self._refused.clear()

    def _discard(self, group: Group) -> None:
        number = self._live.pop(group)
        del self._groups[number]
        for sample in group.samples:
            if sample in self._claims:
                self._forget(sample)
        self.world.discard(group)


def worker(instance: Instance) -> str:
    """The worker's name of an instance."""
    return f"w{instance.number}"


@cache
def payload(version: int) -> Trajectory:
    """One token of these weights: lengths are known here, and the library keeps it only to hand it out."""
    return Trajectory([0], [0], [0.0], [(version, 1)], 0.0)


POLICY = Roq
