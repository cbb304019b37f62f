"""The state of a run in the page's format, from a consistent snapshot of the run's keys."""

from __future__ import annotations

from typing import Any

import msgspec

from roq.events.event import Event
from roq.protocol.snapshot import Snapshot

__all__ = ["picture"]


def picture(run: Snapshot, publishes: list[Event]) -> dict[str, Any]:
    """Create the input of ``restore`` in ``static/state.js``.

    Args:
        run: the run's keys.
        publishes: the ``publish`` events left in the stream, for the curves over versions.

    Returns:
        A JSON object. ``groups`` are the live groups and those in training, each with its place (none in
        training), its kind (``reserved``, ``occupied``, ``training``) and its members from 1 in order;
        times are milliseconds of the server's clock.
    """
    version, frontier = run.number("version"), run.number("frontier")
    places = {group: (kind, place) for place, (kind, group) in run.slots.items()}
    training = run.batches.get(version, []) if frontier > version else []
    groups: list[dict[str, Any]] = []
    for number in [*places, *training]:
        record = run.groups[number]
        kind, place = places.get(number, ("training", None))
        groups.append(
            {
                "group": number,
                "ordinal": record["ordinal"],
                "v": record["v"],
                "since": record["since"],
                "kind": kind,
                "at": None if place is None else f"{place[0]}.{place[1]}",
                "members": [_member(member) for member in record["members"]],
                "judgement": _member(record["judgement"]) if "judgement" in record else None,
            }
        )
    workers: list[dict[str, Any]] = [msgspec.json.decode(record) for record in run.workers.values()]
    return {
        "version": version,
        "frontier": frontier,
        "training": training,
        "checkpoint": run.number("checkpoint"),
        "trainer": run.state.get("trainer", ""),
        "paused": run.number("paused") == 1,
        "ended": run.number("ended") == 1,
        "issued": run.number("next_ordinal"),
        "trained": run.number("trained"),
        "filtered": run.number("filtered"),
        "discarded": run.number("discarded"),
        "requeued": len(run.requeued),
        "dead": len(run.dead),
        "groups": groups,
        "workers": [
            {key: worker.get(key) for key in ("worker", "since", "version", "draining")} for worker in workers
        ],
        "publishes": [{"id": event.id, **event.fields} for event in publishes],
    }


def _member(member: dict[str, Any]) -> dict[str, Any]:
    return {key: member[key] for key in ("state", "worker", "v", "reward", "tokens") if key in member}
