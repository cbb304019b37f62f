"""What each call of the schedulers sends and how it reads the answer, without any I/O.

An operation is a generator: it yields :class:`Call` (a function of the library) or :class:`Command`
(a plain Redis command), is sent the reply, and returns the result. ``Scheduler`` and ``AsyncScheduler``
only drive it, so both behave alike.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from roq import _functions as f
from roq._keys import keys_of
from roq._verify import Snapshot, broken_invariants
from roq.audit import Audit, audit_events
from roq.config import RUN_NAME, RunConfig
from roq.errors import (
    ConfigError,
    Fenced,
    Invalid,
    InvalidTrajectory,
    Refused,
    StateLost,
    UnknownRun,
    refusal,
)
from roq.history import BEGINNING, Event, gap, id_order
from roq.trajectory import Prefix, Trajectory
from roq.types import (
    Batch,
    BatchGroup,
    BatchMember,
    CallStats,
    Completion,
    DeadLetter,
    Grant,
    Release,
    Removal,
    Renewal,
    Reservation,
    SlotStatus,
    Status,
    WeightsRef,
)

__all__ = ["Call", "Command", "Many", "Operation", "Operations"]

T = TypeVar("T")

_FETCH = 128  # payloads read with one command
_PAGE = 1000  # events read with one command
_NEWEST = 20  # pages looked through for the newest event of a kind
_TOGETHER = 32  # calls sent together
_REASON = 2000  # characters of a reason or an error
_INFO = 16 << 10  # bytes of what a worker says of itself with every heartbeat
_METRICS = 4 << 10  # bytes of a step's figures, as in lua/functions/publish.lua
_SETTINGS = 1 << 20  # bytes of a run's configuration
_LOCATION = 4096  # characters of where weights are


class Call(msgspec.Struct, frozen=True):
    """A call of a library function; the request identity, where the function takes one, is the driver's."""

    function: f.Function
    values: tuple[str | bytes, ...]


class Many(msgspec.Struct, frozen=True):
    """Calls that are sent together; answered with a list of replies and of refusals (redis-py's errors)."""

    calls: tuple[Call, ...]


class Command(msgspec.Struct, frozen=True):
    """A plain Redis command that reads."""

    args: tuple[str | bytes | int, ...]


Operation = Generator[Call | Many | Command, Any, T]


class _GroupRecord(msgspec.Struct):
    """A group's record as the library keeps it (lua/lib/groups.lua)."""

    group: int
    ordinal: int
    v: int
    members: list[_MemberRecord]
    since: int = 0
    finish: _MemberRecord | None = None


class _MemberRecord(msgspec.Struct):
    state: str
    worker: str = ""
    v: int = 0
    reward: float = 0.0
    tokens: int = 0
    advantage: float | None = None


class _TakeReply(msgspec.Struct):
    ready: bool
    version: int = 0
    replay: bool = False
    groups: list[int] = []


class _ReservationReply(Reservation, frozen=True, kw_only=True):
    """A reservation as the library tells it: whether there is a prefix, not the prefix itself."""

    prefix: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]


class _GrantReply(msgspec.Struct):
    version: int
    signal: int
    ended: bool
    reservations: list[_ReservationReply] = []
    refused: Any = None


class _Created(msgspec.Struct):
    created: bool


class _Left(msgspec.Struct):
    left: int


class _Drained(msgspec.Struct):
    claims: int


class _Retired(msgspec.Struct):
    retired: list[WeightsRef] = []


def _call(function: f.Function, *values: object) -> Call:
    return Call(function, tuple(v if isinstance(v, bytes) else _encoded(_text(v)) for v in values))


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a path with bytes that are no text, say
        raise Invalid(f"{text[:80]!a} cannot be stored: it is not text") from None


def _json(what: str, value: object, most: int) -> str:
    """A caller's object as JSON of at most ``most`` bytes, which are held in Redis."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"{what} cannot be written as JSON: {error}") from None
    if len(text) > most:
        raise Invalid(f"{len(text)} bytes of {what} are more than {most}; leave something out")
    return text


def _completion(claim: Reservation, payload: Trajectory) -> Call:
    return _call(
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


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _who() -> str:
    """Who asks, for the events of what people do to a run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _reason(text: str) -> str:
    """A reason as it is kept: short, and text that can be encoded."""
    return text[:_REASON].encode(errors="replace").decode() or "no reason given"


def _pairs(flat: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[str, str]:
    if isinstance(flat, Mapping):
        return {key.decode(): value.decode() for key, value in flat.items()}
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _events(reply: Any) -> list[Event]:
    """The events in the answer to XREAD of one stream."""
    if not reply:
        return []
    entries: Any = reply[0][1]
    return [
        Event(
            number.decode(), {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        )
        for number, fields in entries
    ]


def _slot_status(place: tuple[int, int, str, str], record: _GroupRecord, now: float) -> SlotStatus:
    parts = [*record.members, *([record.finish] if record.finish else [])]
    states = [part.state for part in parts]
    return SlotStatus(
        buffer=place[0],
        slot=place[1],
        state=place[2],  # pyright: ignore[reportArgumentType]
        group=record.group,
        ordinal=record.ordinal,
        v_traj=record.v,
        age_s=now - record.since / 1000,
        done=states.count("complete"),
        running=states.count("leased"),
        pending=states.count("pending"),
        workers=sorted({part.worker for part in parts if part.state == "leased"}),
    )


def config_fields(config: RunConfig) -> dict[str, str]:
    """The configuration as the run keeps it: text, defaults filled in, times in milliseconds."""
    values: dict[str, object] = msgspec.structs.asdict(config)
    values["buffer_slots"] = config.slots
    values["group_candidates"] = config.candidates
    for seconds, milliseconds in (("lease_s", "lease_ms"), ("stuck_timeout_s", "stuck_timeout_ms")):
        del values[seconds]
        value: float | None = getattr(config, seconds)
        values[milliseconds] = None if value is None else round(value * 1000)
    return {name: _text(value) for name, value in values.items() if value is not None}


def config_from_fields(fields: Mapping[str, str]) -> RunConfig:
    """The inverse of :func:`config_fields`."""
    values: dict[str, object] = {k: v for k, v in fields.items() if "." not in k}
    for seconds, milliseconds in (("lease_s", "lease_ms"), ("stuck_timeout_s", "stuck_timeout_ms")):
        value = values.pop(milliseconds, None)
        if value is not None:
            values[seconds] = float(str(value)) / 1000
    values["filter_zero_variance"] = values["filter_zero_variance"] == "1"
    values.setdefault("epochs", None)  # no field means endless, which is not the default
    return msgspec.convert(values, RunConfig, strict=False)


class Operations:
    """The operations on one run."""

    def __init__(self, run: str) -> None:
        if not RUN_NAME.fullmatch(run):  # it becomes part of every key
            raise ConfigError(f"run = {run[:80]!r} must be letters, digits, '.', '_' or '-', at most 64")
        self.run = run
        self.by = _who()
        self.keys = keys_of(run)
        self.packed_keys = [key.encode() for key in self.keys.values()]  # they go out with every call

    def _ask(self, function: f.Function, reply: type[T], *values: object) -> Operation[T]:
        answer = yield _call(function, *values)
        return msgspec.json.decode(answer, type=reply, strict=False)  # rewards are numbers kept as text

    # -- the run ------------------------------------------------------------------------------------

    def create(
        self, config: RunConfig, settings: Mapping[str, str] | None, weights: str | None
    ) -> Operation[bool]:
        for name, value in (settings or {}).items():
            if "." not in name or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"setting {name!r} must have a dot in its name and text as its value")
        fields = config_fields(config.checked()) | dict(settings or {})
        ordered = dict(sorted(fields.items()))
        reply = yield from self._ask(f.CREATE, _Created, _json("settings", ordered, _SETTINGS), weights or "")
        return reply.created

    def _fields(self) -> Operation[dict[str, str]]:
        fields = _pairs((yield Command(("HGETALL", self.keys["config"]))))
        if not fields:
            raise UnknownRun(f"there is no run {self.run!r} on this server; create it first (roq init)")
        return fields

    def config(self) -> Operation[RunConfig]:
        return config_from_fields((yield from self._fields()))

    def settings(self) -> Operation[dict[str, str]]:
        fields = yield from self._fields()
        return {name: value for name, value in fields.items() if "." in name}

    def pause(self, paused: bool, reason: str) -> Operation[None]:
        yield from self._ask(f.PAUSE, dict, paused, _reason(reason), self.by)

    def dead(self) -> Operation[list[DeadLetter]]:
        yield from self._fields()  # a run that is not there has no dead letters either
        letters: dict[str, DeadLetter] = {}
        cursor: bytes | int = 0
        while True:
            cursor, page = yield Command(("HSCAN", self.keys["dead"], cursor, "COUNT", _PAGE))
            for ordinal, letter in _pairs(page).items():
                letters[ordinal] = msgspec.json.decode(letter, type=DeadLetter)
            if int(cursor) == 0:
                return sorted(letters.values(), key=lambda letter: letter.ordinal)

    def revive(self, ordinal: int, reason: str) -> Operation[None]:
        yield from self._ask(f.REVIVE, dict, ordinal, _reason(reason), self.by)

    def status(self) -> Operation[Status]:
        status = yield from self._ask(f.STATUS, Status)
        return msgspec.structs.replace(status, run=self.run)

    def verify(self) -> Operation[list[str]]:
        snapshot = yield Call(f.VERIFY, ())
        return broken_invariants(snapshot)

    def audit(self, archive: Iterable[Event] | None) -> Operation[Audit]:
        snapshot = Snapshot((yield Call(f.VERIFY, ())))
        events = list(archive or ())
        after, known = BEGINNING, 0
        while archive is None and (page := (yield from self.events(after, known, 0.0))):
            events += page
            after, known = page[-1].id, known + sum(event.count for event in page)
        return audit_events((event.fields for event in events), snapshot)

    def events(self, after: str, known: int | None, wait_s: float) -> Operation[list[Event]]:
        stream = self.keys["events"]
        block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s > 0 else ()
        page = _events((yield Command(("XREAD", "COUNT", _PAGE, *block, "STREAMS", stream, after))))
        while page:
            about = yield Command(("XINFO STREAM", stream))
            first = about["first-entry"][0].decode()
            if id_order(first) <= id_order(after):
                break
            if first == page[0].id:
                trimmed = int(about["entries-added"]) - int(about["length"])
                if trimmed > (known or 0):
                    page.insert(0, gap(after, None if known is None else trimmed - known))
                break
            # It was trimmed between the two looks: read again.
            page = _events((yield Command(("XREAD", "COUNT", _PAGE, "STREAMS", stream, after))))
        return page

    def newest_event(self, name: str | None) -> Operation[Event | None]:
        last = "+"
        for _ in range(_NEWEST):
            page: Any = yield Command(("XREVRANGE", self.keys["events"], last, "-", "COUNT", _PAGE))
            for event in _events([(None, page)]):
                if name in (None, event.name):
                    return event
            if len(page) < _PAGE:
                return None
            last = f"({page[-1][0].decode()}"
        return None

    def call_stats(self) -> Operation[dict[str, CallStats]]:
        stats: Any = yield Command(("INFO", "commandstats"))
        buckets: Any = yield Command(("LATENCY HISTOGRAM", "fcall", "fcall_ro"))
        found: dict[str, CallStats] = {}
        for command in ("fcall", "fcall_ro"):
            if (total := stats.get(f"cmdstat_{command}")) is None:
                continue
            counts: dict[int, int] = buckets.get(command.encode(), {}).get(b"histogram_usec", {})
            found[command] = CallStats(
                calls=total["calls"],
                seconds=total["usec"] / 1e6,
                histogram=[(micros / 1e6, count) for micros, count in sorted(counts.items())],
            )
        return found

    def slots(self) -> Operation[list[SlotStatus]]:
        now: Any = yield Command(("TIME",))
        places: list[tuple[int, int, str, str]] = []
        for place, content in _pairs((yield Command(("HGETALL", self.keys["slots"])))).items():
            (buffer, slot), (kind, group) = place.split("."), content.split()
            places.append((int(buffer), int(slot), kind, group))
        version = int((yield Command(("HGET", self.keys["state"], "version"))) or 0)
        batch: bytes = (yield Command(("HGET", self.keys["batches"], version))) or b""
        places += [(version, i, "training", group) for i, group in enumerate(batch.decode().split(), 1)]
        found: list[SlotStatus] = []
        for start in range(0, len(places), _FETCH):
            some = sorted(places)[start : start + _FETCH]
            records: Any = yield Command(("HMGET", self.keys["groups"], *(place[3] for place in some)))
            for place, data in zip(some, records, strict=True):
                if data is not None:  # else it left between the looks
                    record = msgspec.json.decode(data, type=_GroupRecord, strict=False)
                    found.append(_slot_status(place, record, int(now[0]) + int(now[1]) / 1e6))
        return found

    # -- workers ------------------------------------------------------------------------------------

    def reserve(self, worker: str, version: int, limit: int) -> Operation[Grant]:
        given: list[_ReservationReply] = []
        while True:  # the library hands out a bounded number per call
            reply = yield from self._ask(f.RESERVE, _GrantReply, worker, version, limit - len(given))
            given += reply.reservations
            if reply.refused or not reply.reservations or len(given) >= limit:
                break
        kept = [r for r in given if r.prefix]
        prefixes: dict[tuple[int, int], Prefix] = {}
        if kept:
            names = [f"{r.group}.{r.member}" for r in kept]
            saved = yield Command(("HMGET", self.keys["prefixes"], *names))
            for r, data in zip(kept, saved, strict=True):
                with suppress(InvalidTrajectory):  # an unreadable prefix is generated anew
                    if data is not None:
                        prefixes[r.group, r.member] = Prefix.decode(data)
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

    def complete(self, claim: Reservation, payload: Trajectory) -> Operation[Completion]:
        answer = yield _completion(claim, payload)
        return msgspec.json.decode(answer, type=Completion)

    def complete_many(
        self, finished: Sequence[tuple[Reservation, Trajectory]]
    ) -> Operation[list[Completion | Refused]]:
        answers: list[Any] = []
        for start in range(0, len(finished), _TOGETHER):
            some = finished[start : start + _TOGETHER]
            answers += yield Many(tuple(_completion(claim, payload) for claim, payload in some))
        return [
            refusal(str(answer))
            if isinstance(answer, Exception)
            else msgspec.json.decode(answer, type=Completion)
            for answer in answers
        ]

    def members(self, group: int) -> Operation[list[Trajectory]]:
        record = yield Command(("HGET", self.keys["groups"], group))
        if record is None:
            raise Fenced(f"group {group} has left the run; drop this work")
        members = msgspec.json.decode(record, type=_GroupRecord, strict=False).members
        names = [f"{group}.{m}" for m, member in enumerate(members, 1) if member.state == "complete"]
        data: list[bytes | None] = []
        if names:
            data = yield Command(("HMGET", self.keys["payloads"], *names))
        payloads = [payload for payload in data if payload is not None]
        if len(payloads) < len(data):  # it left between the two looks
            raise Fenced(f"group {group} has left the run; drop this work")
        return [Trajectory.decode(payload) for payload in payloads]

    def finish(
        self, claim: Reservation, keep: bool, reason: str, advantages: Sequence[float] | None
    ) -> Operation[Completion]:
        # as text: the library keeps all digits of a number that it does not parse
        try:
            given = "" if advantages is None else json.dumps([repr(float(value)) for value in advantages])
        except (TypeError, ValueError) as error:
            raise Invalid(f"advantages must be numbers, one for each member: {error}") from None
        why = "" if keep else _reason(reason)
        return self._ask(f.FINISH, Completion, claim.group, claim.token, claim.worker, keep, why, given)

    def release(
        self, claim: Reservation, prefix: Prefix | None, reason: str, error: str | None
    ) -> Operation[Release]:
        failed = reason == "error"
        kept = prefix.encode() if prefix is not None and len(prefix) > 0 else b""
        why = _reason(error or reason)
        return self._ask(
            f.RELEASE, Release, claim.group, claim.member, claim.token, claim.worker, failed, why, kept
        )

    def save_prefix(self, claim: Reservation, prefix: Prefix) -> Operation[None]:
        yield from self._ask(
            f.SAVE_PREFIX, dict, claim.group, claim.member, claim.token, claim.worker, prefix.encode()
        )

    def renew(
        self, worker: str, version: int | None, info: Mapping[str, object] | None, acknowledged: int
    ) -> Operation[Renewal]:
        about = "" if info is None else _json("info", info, _INFO)
        return self._ask(f.RENEW, Renewal, worker, "" if version is None else version, about, acknowledged)

    def drain(self, worker: str, reason: str) -> Operation[int]:
        reply = yield from self._ask(f.DRAIN, _Drained, worker, _reason(reason), self.by)
        return reply.claims

    def leave(self, worker: str) -> Operation[None]:
        while (yield from self._ask(f.LEAVE, _Left, worker)).left > 0:
            pass

    def pin(self, worker: str, version: int | None) -> Operation[WeightsRef]:
        return self._ask(f.PIN, WeightsRef, worker, "" if version is None else version)

    def drop(self, group: int, reason: str) -> Operation[Removal]:
        return self._ask(f.DROP, Removal, group, _reason(reason), self.by)

    def filter(self, group: int, reason: str) -> Operation[Removal]:
        return self._ask(f.FILTER, Removal, group, _reason(reason), self.by)

    # -- the trainer --------------------------------------------------------------------------------

    def take(self, trainer: str, version: int | None) -> Operation[Batch | None]:
        reply = yield from self._ask(f.TAKE, _TakeReply, trainer, "" if version is None else version)
        if not reply.ready:
            return None
        data = yield from self._fetch("groups", [str(group) for group in reply.groups])
        records = [msgspec.json.decode(record, type=_GroupRecord, strict=False) for record in data]
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
                    )
                    for m, member in enumerate(record.members, start=1)
                    if member.state == "complete"
                ],
            )
            for slot, record in enumerate(records, start=1)
        ]
        return Batch(version=reply.version, groups=groups, replay=reply.replay)

    def payloads(self, groups: Sequence[BatchGroup]) -> Operation[list[list[Trajectory]]]:
        names = [f"{g.group}.{m.member}" for g in groups for m in g.members]
        found = iter((yield from self._fetch("payloads", names)))
        return [[Trajectory.decode(next(found)) for _ in group.members] for group in groups]

    def _fetch(self, key: str, names: Sequence[str]) -> Operation[list[bytes]]:
        """What a taken batch has under ``names``, in portions."""
        data: list[bytes | None] = []
        for start in range(0, len(names), _FETCH):
            data += yield Command(("HMGET", self.keys[key], *names[start : start + _FETCH]))
        missing = [name for name, value in zip(names, data, strict=True) if value is None]
        if missing:
            raise StateLost(
                f"the {key} {', '.join(missing[:8])} are not on the server any more; "
                "restart the trainer from its newest checkpoint"
            )
        return [value for value in data if value is not None]

    def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None
    ) -> Operation[None]:
        figures = "" if metrics is None else _json("metrics", metrics, _METRICS)
        if len(weights) > _LOCATION or "\0" in weights:
            raise Invalid(f"weights = {weights[:80]!r} must be at most {_LOCATION} characters without NUL")
        yield from self._ask(f.PUBLISH, dict, trainer, version, weights, figures)

    def serve(self, address: str, trainer: str) -> Operation[None]:
        yield from self._ask(f.SERVE, dict, trainer, address)

    def checkpointed(self, version: int, trainer: str) -> Operation[None]:
        while (yield from self._ask(f.CHECKPOINTED, _Left, trainer, version)).left > 0:
            pass

    def weights(self) -> Operation[list[WeightsRef]]:
        found = _pairs((yield Command(("HGETALL", self.keys["weights"]))))
        versions = sorted((int(version), location) for version, location in found.items())
        return [WeightsRef(version=version, location=location) for version, location in versions]

    def retire_weights(self, trainer: str, keep: int) -> Operation[list[WeightsRef]]:
        reply = yield from self._ask(f.RETIRE_WEIGHTS, _Retired, trainer, keep)
        return reply.retired
