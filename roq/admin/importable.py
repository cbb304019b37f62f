"""Check that an export contains a valid run: files are untrusted input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roq.client.operations import config_fields, config_from_fields
from roq.protocol import library
from roq.protocol.invariants import problems
from roq.protocol.snapshot import Snapshot

__all__ = ["STATE", "problem_of"]

_COUNT = re.compile(r"\d{1,16}", re.ASCII)
STATE = (  # numbers that roq_create writes, so they are always present
    *("version", "frontier", "checkpoint", "freed", "next_ordinal", "next_group", "next_token", "trained"),
    *("filtered", "discarded", "payload_bytes", "signal", "ready_signal", "next_cancel", "next_pending"),
    *("paused", "ended", "revision", "created"),
)


def problem_of(content: Sequence[Any]) -> str | None:
    """Why ``content``, shaped like a reply of ``roq_verify``, is not a run that can continue; or None."""
    try:
        return _problem(Snapshot(content))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # parsing a valid run of this library never raises any of these
        return f"{type(error).__name__}: {error}"


def _problem(run: Snapshot) -> str | None:
    """Why a snapshot is not a run that can continue; None if it is."""
    config = config_from_fields(run.config)
    if missing := config_fields(config).keys() - run.config.keys():
        return f"its configuration lacks {', '.join(sorted(missing))}"
    if bad := [name for name in STATE if not _COUNT.fullmatch(run.state.get(name, ""))]:
        return f"its state lacks {', '.join(bad)}"
    if run.number("revision") != library.REVISION:
        return f"it is of library revision {run.state['revision']}, not {library.REVISION}"
    version, frontier, checkpoint = map(run.number, ("version", "frontier", "checkpoint"))
    # checked before the invariants, which visit every buffer and batch between these
    if not checkpoint <= version <= frontier <= version + 1 or frontier - checkpoint > len(run.batches):
        return f"its version is {version}, its frontier {frontier}, its checkpoint {checkpoint}"
    return next(iter(problems(run)), None)
