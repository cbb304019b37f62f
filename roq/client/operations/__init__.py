"""The commands that each call of a scheduler sends, and the decoding of their replies; no network access.

An operation is a generator: it yields :class:`Call` (a function of the library) or :class:`Command`
(a plain Redis command), is sent the reply, and returns the result. ``Scheduler`` and ``AsyncScheduler``
only drive it, so both behave the same. A scheduler's method, its operation and its function in the library,
if it has one, share a name: ``Scheduler.take``, ``TrainerOperations.take``, ``lua/functions/take.lua``.
"""

from __future__ import annotations

from roq.client.operations.commands import Call, Command, Many, Operation
from roq.client.operations.observe import ObserverOperations
from roq.client.operations.run import RunOperations, config_fields, config_from_fields
from roq.client.operations.trainer import TrainerOperations
from roq.client.operations.worker import WorkerOperations

__all__ = ["Call", "Command", "Many", "Operation", "Operations", "config_fields", "config_from_fields"]


class Operations(RunOperations, ObserverOperations, WorkerOperations, TrainerOperations):
    """The operations on one run."""
