"""The operations of a rollout worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from roq.client.operations.commands import (
    Call,
    Command,
    Left,
    Many,
    Operation,
    Steps,
    as_json,
    call,
    reason_text,
)
from roq.errors import Fenced, Invalid, InvalidTrajectory, Refused, is_refusal, refusal
from roq.limits import SETTINGS, Limits
from roq.protocol import functions as f
from roq.protocol.records import GroupRecord
from roq.trajectory import Response, Trajectory
from roq.types import Completion, Grant, Release, Renewal, Reservation, WeightsRef

__all__ = ["WorkerOperations"]

_TOGETHER = 32  # calls sent together
_INFO = 16 << 10  # bytes of a heartbeat's figures


class _ReservationReply(Reservation, frozen=True, kw_only=True):
    """A reservation as the library returns it: with a flag in place of the prefix."""

    prefix: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]


class _GrantReply(msgspec.Struct):
    version: int
    signal: int
    ended: bool
    reservations: list[_ReservationReply] = []
    refused: Any = None


class WorkerOperations(Steps):
    """Operations of a rollout worker."""

    def reserve(self, worker: str, version: int, limit: int) -> Operation[Grant]:
        given: list[_ReservationReply] = []
        while True:  # the library hands out a bounded number per call
            reply = yield from self._ask(f.RESERVE, _GrantReply, worker, version, limit - len(given))
            given += reply.reservations
            if reply.refused or not reply.reservations or len(given) >= limit:
                break
        kept = [r for r in given if r.prefix]
        prefixes: dict[tuple[int, int], Response] = {}
        if kept:
            names = [f"{r.group}.{r.member}" for r in kept]
            saved = yield Command(("HMGET", self.keys["prefixes"], *names))
            for r, data in zip(kept, saved, strict=True):
                with suppress(InvalidTrajectory):  # an unreadable prefix is generated again
                    if data is not None:
                        prefixes[r.group, r.member] = Response.decode(data)
        reservations: list[Reservation] = []
        for claim in given:
            fields: dict[str, Any] = msgspec.structs.asdict(claim)
            fields["prefix"] = prefixes.get((claim.group, claim.member))
            reservations.append(Reservation(**fields))
        return Grant(
            reservations=reservations,
            refused=reply.refused,
            version=reply.version,
            signal=reply.signal,
            ended=reply.ended,
        )

    _limits: Limits | None = None  # read before the first trajectory is handed in; fixed with the run

    def _unusable(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> Operation[list[Invalid | None]]:
        """What is wrong with each trajectory; the library sees bytes, and cannot tell."""
        if self._limits is None:
            values = yield Command(("HMGET", self.keys["config"], *SETTINGS.values()))
            known = {name: int(value) for name, value in zip(SETTINGS, values, strict=True) if value}
            self._limits = Limits(**known)
        problems = [self._limits.problem(payload) for _, payload in finished]
        return [
            None if problem is None else Invalid(f"group {claim.group}, member {claim.member}: {problem}")
            for (claim, _), problem in zip(finished, problems, strict=True)
        ]

    def complete(self, claim: Reservation, payload: Trajectory) -> Operation[Completion]:
        (unusable,) = yield from self._unusable([(claim, payload)])
        if unusable is not None:
            raise unusable
        answer = yield _completion(claim, payload)
        return msgspec.json.decode(answer, type=Completion)

    def complete_many(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> Operation[list[Completion | Refused]]:
        unusable = yield from self._unusable(finished)
        usable = [pair for pair, problem in zip(finished, unusable, strict=True) if problem is None]
        answers: list[Any] = []
        for start in range(0, len(usable), _TOGETHER):
            some = usable[start : start + _TOGETHER]
            answers += yield Many(tuple(_completion(claim, payload) for claim, payload in some))
        replies = map(_completed, answers)
        return [next(replies) if problem is None else problem for problem in unusable]

    def group_trajectories(self, group: int) -> Operation[list[Trajectory]]:
        record = yield Command(("HGET", self.keys["groups"], group))
        if record is None:
            raise Fenced(f"group {group} has left the run; drop this work")
        members = msgspec.json.decode(record, type=GroupRecord, strict=False).members
        names = [f"{group}.{m}" for m, member in enumerate(members, 1) if member.state == "complete"]
        data: list[bytes | None] = []
        if names:
            data = yield Command(("HMGET", self.keys["payloads"], *names))
        payloads = [payload for payload in data if payload is not None]
        if len(payloads) < len(data):  # it left between the two reads
            raise Fenced(f"group {group} has left the run; drop this work")
        return [Trajectory.decode(payload) for payload in payloads]

    def judge(
        self, claim: Reservation, keep: bool, reason: str, advantages: Sequence[float] | None
    ) -> Operation[Completion]:
        # as text: the library keeps all digits of a number that it does not parse
        try:
            given = "" if advantages is None else json.dumps([repr(float(value)) for value in advantages])
        except (TypeError, ValueError) as error:
            raise Invalid(f"advantages must be numbers, one for each member: {error}") from None
        why = "" if keep else reason_text(reason)
        return self._ask(f.JUDGE, Completion, claim.group, claim.token, claim.worker, keep, why, given)

    def release(self, claim: Reservation, prefix: Response | None, reason: str) -> Operation[Release]:
        kept = prefix.encode() if prefix is not None and len(prefix) > 0 else b""
        why = reason_text(reason)
        return self._ask(f.RELEASE, Release, claim.group, claim.member, claim.token, claim.worker, why, kept)

    def fail(self, claim: Reservation, error: str) -> Operation[Release]:
        why = reason_text(error)
        return self._ask(f.FAIL, Release, claim.group, claim.member, claim.token, claim.worker, why)

    def save_prefix(self, claim: Reservation, prefix: Response) -> Operation[None]:
        yield from self._ask(
            f.SAVE_PREFIX, dict, claim.group, claim.member, claim.token, claim.worker, prefix.encode()
        )

    def renew(
        self, worker: str, version: int | None, info: Mapping[str, object] | None, acknowledged: int
    ) -> Operation[Renewal]:
        about = "" if info is None else as_json("info", info, _INFO)
        return self._ask(f.RENEW, Renewal, worker, "" if version is None else version, about, acknowledged)

    def pin(self, worker: str, version: int | None) -> Operation[WeightsRef]:
        return self._ask(f.PIN, WeightsRef, worker, "" if version is None else version)

    def leave(self, worker: str) -> Operation[None]:
        while (yield from self._ask(f.LEAVE, Left, worker)).left > 0:
            pass


def _completed(answer: Any) -> Completion | Refused:
    if not isinstance(answer, Exception):
        return msgspec.json.decode(answer, type=Completion)
    if is_refusal(str(answer)):
        return refusal(str(answer))
    raise answer  # of the server, not of the library


def _completion(claim: Reservation, payload: Trajectory) -> Call:
    return call(
        f.COMPLETE,
        claim.group,
        claim.member,
        claim.token,
        claim.worker,
        payload.reward,
        len(payload.tokens),
        payload.segments[0][0],
        payload.segments[-1][0],
        payload.encode(),
    )
