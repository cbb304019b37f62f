"""The operations that only read a run: its events, its slots, the cost of its calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from roq.client.operations.commands import FETCH, PAGE, Call, Command, Operation, Steps, pairs
from roq.events.audit import Audit, audit_events
from roq.events.event import BEGINNING, Event, gap, id_order
from roq.events.fields import EVENTS, refuse_bad_fields
from roq.protocol import functions as f
from roq.protocol.records import GroupRecord
from roq.protocol.snapshot import Snapshot
from roq.types import CallStats, SlotStatus

__all__ = ["ObserverOperations"]

_BLOCK_S = 2.0  # one blocking read; shorter than the socket's timeout
_NEWEST = 20  # pages searched for the newest event of a kind


log = logging.getLogger("roq")


class ObserverOperations(Steps):
    """Operations of an observer."""

    _warned = False

    def _events(self, reply: Any) -> list[Event]:
        """The events in the reply to XREAD of one stream; warns once of those that cannot be read."""
        entries: Any = reply[0][1] if reply else ()
        read = [_event(number, fields) for number, fields in entries]
        bad = next(((event, problem) for event, problem in read if problem), None)
        if bad is not None and not self._warned:
            self._warned = True
            log.warning(
                "event %s of run %s is not the library's: %s; it and others like it count as 'other'",
                bad[0].id,
                self.run,
                bad[1],
            )
        return [event for event, _ in read]

    def events(self, after: str, known: int | None, wait_s: float) -> Operation[list[Event]]:
        stream = self.keys["events"]
        block = ("BLOCK", _block_ms(wait_s)) if wait_s > 0 else ()
        page = self._events((yield Command(("XREAD", "COUNT", PAGE, *block, "STREAMS", stream, after))))
        if not page:
            yield from self._check_exists()
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
            # The stream was trimmed between the two reads: read again.
            page = self._events((yield Command(("XREAD", "COUNT", PAGE, "STREAMS", stream, after))))
        return page

    def newest_event(self, name: str | None) -> Operation[Event | None]:
        last = "+"
        for _ in range(_NEWEST):
            page: Any = yield Command(("XREVRANGE", self.keys["events"], last, "-", "COUNT", PAGE))
            for event in self._events([(None, page)]):
                if name in (None, event.name):
                    return event
            if not page and last == "+":
                yield from self._check_exists()
            if len(page) < PAGE:
                return None
            last = f"({page[-1][0].decode()}"
        return None

    def audit(self, archive: Iterable[Event] | None) -> Operation[Audit]:
        yield from self._check_exists()
        snapshot = Snapshot((yield Call(f.VERIFY, ())))
        events = list(archive or ())
        after, known = BEGINNING, 0
        while archive is None and (page := (yield from self.events(after, known, 0.0))):
            events += page
            after, known = page[-1].id, known + sum(event.count for event in page)
        return audit_events(events, int(snapshot.config["eta"]), snapshot)

    def slots(self) -> Operation[list[SlotStatus]]:
        now: Any = yield Command(("TIME",))
        places: list[tuple[int, int, str, str]] = []
        for place, content in pairs((yield Command(("HGETALL", self.keys["slots"])))).items():
            (buffer, slot), (kind, group) = place.split("."), content.split()
            places.append((int(buffer), int(slot), kind, group))
        version = int((yield Command(("HGET", self.keys["state"], "version"))) or 0)
        batch: bytes = (yield Command(("HGET", self.keys["batches"], version))) or b""
        places += [(version, i, "training", group) for i, group in enumerate(batch.decode().split(), 1)]
        if not places:
            yield from self._check_exists()
        found: list[SlotStatus] = []
        for start in range(0, len(places), FETCH):
            some = sorted(places)[start : start + FETCH]
            records: Any = yield Command(("HMGET", self.keys["groups"], *(place[3] for place in some)))
            for place, data in zip(some, records, strict=True):
                if data is not None:  # otherwise it left between the reads
                    record = msgspec.json.decode(data, type=GroupRecord, strict=False)
                    found.append(_slot_status(place, record, int(now[0]) + int(now[1]) / 1e6))
        return found

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

    def wait(self, signal: int, timeout_s: float, batch: bool) -> Operation[int]:
        stream, field = ("ready", "ready_signal") if batch else ("signals", "signal")
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            read = ("XREAD", "BLOCK", _block_ms(left), "STREAMS", self.keys[stream], f"{signal}-0")
            if (yield Command(read)):
                newest: Any = yield Command(("HGET", self.keys["state"], field))
                return int(newest)
            yield from self._check_exists()
        return signal


def _block_ms(seconds: float) -> int:
    return max(1, round(min(seconds, _BLOCK_S) * 1000))


def _event(number: bytes, raw: Mapping[bytes, bytes]) -> tuple[Event, str]:
    """An entry of the stream as an event, and what is wrong with it.

    A worker may write anything to the stream: an unreadable entry becomes the event ``other``. An event that
    only a newer library knows keeps its name and fields.
    """
    id_ = number.decode()
    problem = ""
    fields: dict[str, str] = {}
    try:
        fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
        refuse_bad_fields(fields)
    except ValueError as error:  # UnicodeDecodeError is one
        problem = str(error)
    if fields.get("event") in ("archive", "gap") or "id" in fields:
        problem = "only archives have such lines"
    if problem:
        return Event(id_, {"event": "other", "problem": problem}), problem
    problem = "" if fields["event"] in EVENTS else f"{fields['event'][:60]!r} is not an event of this version"
    return Event(id_, fields), problem


def _slot_status(place: tuple[int, int, str, str], record: GroupRecord, now: float) -> SlotStatus:
    parts = [*record.members, *([record.judgement] if record.judgement else [])]
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
