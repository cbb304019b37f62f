"""The operations on the run as a whole: create it, control it, read its state."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from roq.client.operations.commands import (
    PAGE,
    Call,
    Command,
    Operation,
    Steps,
    as_json,
    as_text,
    pairs,
    reason_text,
)
from roq.config import RunConfig
from roq.errors import ConfigError
from roq.protocol import functions as f
from roq.protocol.invariants import broken_invariants
from roq.types import DeadLetter, Removal, Status

__all__ = ["RunOperations", "config_fields", "config_from_fields"]

_SETTINGS = 1 << 20  # bytes of a run's configuration


class _Created(msgspec.Struct):
    created: bool


class _Configured(msgspec.Struct):
    changed: int


class _Drained(msgspec.Struct):
    claims: int


class RunOperations(Steps):
    """Operations of an operator."""

    def create(
        self, config: RunConfig, settings: Mapping[str, str] | None, weights: str | None
    ) -> Operation[bool]:
        for name, value in (settings or {}).items():
            if "." not in name or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"setting {name!r} must have a dot in its name and text as its value")
        fields = config_fields(config.checked()) | dict(settings or {})
        ordered = dict(sorted(fields.items()))
        reply = yield from self._ask(
            f.CREATE, _Created, as_json("settings", ordered, _SETTINGS), weights or ""
        )
        return reply.created

    def _fields(self) -> Operation[dict[str, str]]:
        fields = pairs((yield Command(("HGETALL", self.keys["config"]))))
        if not fields:
            raise self._unknown()
        return fields

    def config(self) -> Operation[RunConfig]:
        return config_from_fields((yield from self._fields()))

    def settings(self) -> Operation[dict[str, str]]:
        fields = yield from self._fields()
        return {name: value for name, value in fields.items() if "." in name}

    def configure(self, changes: Mapping[str, str]) -> Operation[int]:
        text = as_json("changes", dict(sorted(changes.items())), _SETTINGS)
        return (yield from self._ask(f.CONFIGURE, _Configured, text, self.by)).changed

    def pause(self, reason: str) -> Operation[None]:
        yield from self._ask(f.PAUSE, dict, reason_text(reason), self.by)

    def resume(self, reason: str) -> Operation[None]:
        yield from self._ask(f.RESUME, dict, reason_text(reason), self.by)

    def dead(self) -> Operation[list[DeadLetter]]:
        yield from self._fields()  # an unknown run has no dead letters either
        letters: dict[str, DeadLetter] = {}
        cursor: bytes | int = 0
        while True:
            cursor, page = yield Command(("HSCAN", self.keys["dead"], cursor, "COUNT", PAGE))
            for ordinal, letter in pairs(page).items():
                letters[ordinal] = msgspec.json.decode(letter, type=DeadLetter)
            if int(cursor) == 0:
                return sorted(letters.values(), key=lambda letter: letter.ordinal)

    def revive(self, ordinal: int, reason: str) -> Operation[None]:
        yield from self._ask(f.REVIVE, dict, ordinal, reason_text(reason), self.by)

    def drain(self, worker: str, reason: str) -> Operation[int]:
        reply = yield from self._ask(f.DRAIN, _Drained, worker, reason_text(reason), self.by)
        return reply.claims

    def drop(self, group: int, reason: str) -> Operation[Removal]:
        return self._ask(f.DROP, Removal, group, reason_text(reason), self.by)

    def filter(self, group: int, reason: str) -> Operation[Removal]:
        return self._ask(f.FILTER, Removal, group, reason_text(reason), self.by)

    def reject(self, group: int, reason: str) -> Operation[Removal]:
        return self._ask(f.REJECT, Removal, group, reason_text(reason), self.by)

    def status(self) -> Operation[Status]:
        status = yield from self._ask(f.STATUS, Status)
        return msgspec.structs.replace(status, run=self.run)

    def verify(self) -> Operation[list[str]]:
        snapshot = yield Call(f.VERIFY, ())
        return broken_invariants(snapshot)


def config_fields(config: RunConfig) -> dict[str, str]:
    """The configuration as the run stores it: text, defaults filled in, times in milliseconds."""
    values: dict[str, object] = msgspec.structs.asdict(config)
    values["buffer_slots"] = config.slots
    values["group_candidates"] = config.candidates
    for seconds, milliseconds in (("lease_s", "lease_ms"), ("stuck_timeout_s", "stuck_timeout_ms")):
        del values[seconds]
        value: float | None = getattr(config, seconds)
        values[milliseconds] = None if value is None else round(value * 1000)
    return {name: as_text(value) for name, value in values.items() if value is not None}


def config_from_fields(fields: Mapping[str, str]) -> RunConfig:
    """The inverse of :func:`config_fields`."""
    values: dict[str, object] = {k: v for k, v in fields.items() if "." not in k}
    for seconds, milliseconds in (("lease_s", "lease_ms"), ("stuck_timeout_s", "stuck_timeout_ms")):
        value = values.pop(milliseconds, None)
        if value is not None:
            values[seconds] = float(str(value)) / 1000
    values["filter_zero_variance"] = values["filter_zero_variance"] == "1"
    for name in ("epochs", "pause_after_failures"):  # no field means none, which is not the default
        values.setdefault(name, None)
    return msgspec.convert(values, RunConfig, strict=False)
