"""The keys of a run, in the order in which every function of the library takes them."""

from __future__ import annotations

__all__ = ["NAMES", "keys_of"]

# lua/lib/context.lua says what each holds; tests/protocol/test_contract.py holds the two lists together.
NAMES = (
    "config",
    "state",
    "slots",
    "groups",
    "reserved",
    "occupied",
    "reserved_by_version",
    "payloads",
    "prefixes",
    "claims",
    "pending",
    "workers",
    "heartbeats",
    "pins",
    "cancelled",
    "departed",
    "requeued",
    "dead",
    "batches",
    "weights",
    "replies",
    "clients",
    "events",
    "signals",
    "ready",
)


def keys_of(run: str) -> dict[str, str]:
    """Key names of a run by what they hold; the braces keep them in one slot of a Redis Cluster."""
    return {name: f"roq:{{{run}}}:{name}" for name in NAMES}
