"""A run's history: its events, read from Redis or from an archive, followed, replayed and audited."""

from __future__ import annotations

from roq.events.archive import Archive, archived_config, read_archive
from roq.events.audit import Audit, audit_events
from roq.events.event import BEGINNING, Event, Move, Place
from roq.events.follow import follow, read_events
from roq.events.replay import Replay

__all__ = [
    "BEGINNING",
    "Archive",
    "Audit",
    "Event",
    "Move",
    "Place",
    "Replay",
    "archived_config",
    "audit_events",
    "follow",
    "read_archive",
    "read_events",
]
