"""A run's keys, parsed from one consistent snapshot (``roq_verify``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["AGES", "SPAN", "Snapshot"]

# Factors that pack places into scores; tests/protocol/test_contract.py compares them with lua/lib/slots.lua.
SPAN = 1_000_000
AGES = 1_000


def _hash(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _zset(flat: Sequence[bytes]) -> dict[str, int]:
    return {flat[i].decode(): int(float(flat[i + 1])) for i in range(0, len(flat), 2)}


class Snapshot:
    """The keys of a run, parsed."""

    def __init__(self, reply: Sequence[Any]) -> None:
        parts = {reply[i].decode(): reply[i + 1] for i in range(0, len(reply), 2)}
        self.config = _hash(parts["config"])
        self.state = _hash(parts["state"])
        self.slots = {
            (int(place.split(".")[0]), int(place.split(".")[1])): (
                content.split()[0],
                int(content.split()[1]),
            )
            for place, content in _hash(parts["slots"]).items()
        }
        self.groups: dict[int, Any] = {
            int(g): json.loads(record) for g, record in _hash(parts["groups"]).items()
        }
        self.workers = _hash(parts["workers"])
        self.pins = _hash(parts["pins"])
        self.dead = _hash(parts["dead"])
        self.batches = {
            int(b): [int(g) for g in groups.split()] for b, groups in _hash(parts["batches"]).items()
        }
        self.weights = _hash(parts["weights"])
        self.index = {
            kind: {int(g): divmod(score, SPAN) for g, score in _zset(parts[kind]).items()}
            for kind in ("reserved", "occupied")
        }
        self.by_version = {int(g): score for g, score in _zset(parts["reserved_by_version"]).items()}
        self.claims = {tuple(claim.split()) for claim in _zset(parts["claims"])}
        self.pending_order = _zset(parts["pending"])
        self.pending = set(self.pending_order)
        self.lease_ends = _zset(parts["heartbeats"])
        self.heartbeats = set(self.lease_ends)
        self.cancelled = list(_zset(parts["cancelled"]))
        self.departed = set(_zset(parts["departed"]))
        self.payloads = {name.decode() for name in parts["payloads"]}
        self.prefixes = {name.decode() for name in parts["prefixes"]}
        self.requeued = [entry.decode() for entry in parts["requeued"]]

    def number(self, field: str) -> int:
        return int(self.state[field])
