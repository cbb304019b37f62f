"""The keys of a run and their types, in the order in which every library function takes them."""

from __future__ import annotations

__all__ = ["KINDS", "NAMES", "keys_of"]

# lua/lib/context.lua documents each; tests/protocol/test_contract.py compares the two lists.
KINDS = {
    "config": "hash",
    "state": "hash",
    "slots": "hash",
    "groups": "hash",
    "reserved": "zset",
    "occupied": "zset",
    "reserved_by_version": "zset",
    "payloads": "hash",
    "prefixes": "hash",
    "claims": "zset",
    "pending": "zset",
    "workers": "hash",
    "heartbeats": "zset",
    "pins": "hash",
    "cancelled": "zset",
    "departed": "zset",
    "requeued": "list",
    "dead": "hash",
    "batches": "hash",
    "weights": "hash",
    "sender": "hash",
    "replies": "hash",
    "clients": "zset",
    "events": "stream",
    "signals": "stream",
    "ready": "stream",
}
NAMES = tuple(KINDS)


def keys_of(run: str) -> dict[str, str]:
    """Kind -> key of a run; the braces keep all keys in one slot of a Redis Cluster."""
    return {name: f"roq:{{{run}}}:{name}" for name in NAMES}
