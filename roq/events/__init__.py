"""Read, follow, replay and audit a run's events, from Redis or from an archive.

An archive written by ``roq events --archive`` shows how long the trainer waited for each batch and what
happened to every prompt:

>>> from collections import Counter
>>> from roq.events import Batch, Replay, audit_events, read_archive
>>> class Waits(Replay):
...     def on_taken(self, batch: Batch) -> None:
...         if batch.wait_s > 3:
...             print(f"step {batch.number}: waited {batch.wait_s:.1f} s for {batch.tokens} tokens")
>>> replay = Waits()
>>> for event in read_archive("events.jsonl.gz"):
...     replay.apply(event)
step 1: waited 25.7 s for 991 tokens
>>> Counter(replay.prompts.values())
Counter({'trained': 768})
>>> audit_events(read_archive("events.jsonl.gz"), eta=1).problems
[]

``read_events(scheduler)`` and ``follow(scheduler)`` read from Redis instead.
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
