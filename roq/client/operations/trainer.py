"""The operations of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from roq.client.operations.commands import FETCH, Command, Left, Operation, Steps, as_json, pairs
from roq.errors import Invalid, StateLost
from roq.protocol import functions as f
from roq.protocol.records import GroupRecord
from roq.trajectory import Trajectory
from roq.types import Batch, BatchGroup, BatchMember, WeightsRef

__all__ = ["METRICS_BYTES", "TrainerOperations"]

METRICS_BYTES = 4 << 10  # bytes of a step's metrics, the limit of lua/functions/publish.lua
_LOCATION = 4096  # characters of a weights location


class _TakeReply(msgspec.Struct):
    ready: bool
    version: int = 0
    replay: bool = False
    groups: list[int] = []


class _Retired(msgspec.Struct):
    retired: list[WeightsRef] = []


class TrainerOperations(Steps):
    """Operations of the trainer."""

    def take(self, trainer: str, version: int | None) -> Operation[Batch | None]:
        reply = yield from self._ask(f.TAKE, _TakeReply, trainer, "" if version is None else version)
        if not reply.ready:
            return None
        data = yield from self._fetch("groups", [str(group) for group in reply.groups])
        records = [msgspec.json.decode(record, type=GroupRecord, strict=False) for record in data]
        groups = [
            BatchGroup(
                group=record.group,
                ordinal=record.ordinal,
                slot=slot,
                v_traj=record.v,
                staleness=reply.version - record.v,
                members=[
                    BatchMember(
                        member=m,
                        reward=member.reward,
                        tokens=member.tokens,
                        v_traj=member.v,
                        advantage=member.advantage,
                        worker=member.worker,
                    )
                    for m, member in enumerate(record.members, start=1)
                    if member.state == "complete"
                ],
            )
            for slot, record in enumerate(records, start=1)
        ]
        return Batch(version=reply.version, groups=groups, replay=reply.replay)

    def trajectories(self, groups: Sequence[BatchGroup]) -> Operation[list[list[Trajectory]]]:
        found = iter((yield from self.encoded_trajectories(groups)))
        return [[Trajectory.decode(next(found)) for _ in group.members] for group in groups]

    def encoded_trajectories(self, groups: Sequence[BatchGroup]) -> Operation[list[bytes]]:
        names = [f"{g.group}.{m.member}" for g in groups for m in g.members]
        return (yield from self._fetch("payloads", names))

    def _fetch(self, key: str, names: Sequence[str]) -> Operation[list[bytes]]:
        """The values of ``names`` in a taken batch, read in portions."""
        data: list[bytes | None] = []
        for start in range(0, len(names), FETCH):
            data += yield Command(("HMGET", self.keys[key], *names[start : start + FETCH]))
        missing = [name for name, value in zip(names, data, strict=True) if value is None]
        if missing:
            raise StateLost(
                f"the {key} {', '.join(missing[:8])} are no longer on the server; "
                "restart the trainer from its newest checkpoint"
            )
        return [value for value in data if value is not None]

    def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None
    ) -> Operation[None]:
        figures = "" if metrics is None else as_json("metrics", metrics, METRICS_BYTES)
        if len(weights) > _LOCATION or "\0" in weights:
            raise Invalid(f"weights = {weights[:80]!r} must be at most {_LOCATION} characters without NUL")
        yield from self._ask(f.PUBLISH, dict, trainer, version, weights, figures)

    def announce_sender(self, address: str, trainer: str) -> Operation[None]:
        yield from self._ask(f.ANNOUNCE_SENDER, dict, trainer, address)

    def checkpointed(self, version: int, trainer: str) -> Operation[None]:
        while (yield from self._ask(f.CHECKPOINTED, Left, trainer, version)).left > 0:
            pass

    def weights(self) -> Operation[list[WeightsRef]]:
        found = pairs((yield Command(("HGETALL", self.keys["weights"]))))
        if not found:
            yield from self._check_exists()
        sender = ((yield Command(("HGET", self.keys["sender"], "address"))) or b"").decode()
        versions = sorted((int(version), location) for version, location in found.items())
        return [WeightsRef(version=version, location=where, sender=sender) for version, where in versions]

    def retire_weights(self, trainer: str, keep: int) -> Operation[list[WeightsRef]]:
        reply = yield from self._ask(f.RETIRE_WEIGHTS, _Retired, trainer, keep)
        return reply.retired
