"""A run's history: its events, read from Redis or from an archive, followed, replayed and audited.

How many prompts of an archived run went where, and how long its trainer waited for each batch::

    from roq.events import Batch, Replay, read_archive

    class Waits(Replay):
        def on_taken(self, batch: Batch) -> None:
            print(f"batch {batch.version}: {batch.wait_s:.1f} s, {batch.tokens} tokens")

    replay = Waits()
    for event in read_archive("events.jsonl"):
        replay.apply(event)
    print(Counter(replay.prompts.values()))

``read_events(scheduler)`` and ``follow(scheduler)`` yield the events of a run in Redis.
"""

from __future__ import annotations

from roq.events.archive import Archive, archived_config, read_archive
from roq.events.audit import Audit, audit_events
from roq.events.event import BEGINNING, Event, Move, Place
from roq.events.follow import follow, read_events
from roq.events.history import Batch, GroupHistory, MemberHistory
from roq.events.replay import Replay

__all__ = [
    "BEGINNING",
    "Archive",
    "Audit",
    "Batch",
    "Event",
    "GroupHistory",
    "MemberHistory",
    "Move",
    "Place",
    "Replay",
    "archived_config",
    "audit_events",
    "follow",
    "read_archive",
    "read_events",
]
