"""roq: Reserve-Occupy Queue, a staleness-bounded scheduler for asynchronous RL, inside Redis."""

from roq import errors
from roq.client import Scheduler
from roq.client.async_scheduler import AsyncScheduler
from roq.config import Job, RunConfig, load_job
from roq.errors import *  # noqa: F403 - every error
from roq.trajectory import Response, Trajectory
from roq.types import (
    Batch,
    BatchGroup,
    BatchMember,
    CallStats,
    Completion,
    DeadLetter,
    Grant,
    Release,
    Removal,
    Renewal,
    Reservation,
    SlotStatus,
    Status,
    WeightsRef,
)

__all__ = [
    "AsyncScheduler",
    "Batch",
    "BatchGroup",
    "BatchMember",
    "CallStats",
    "Completion",
    "DeadLetter",
    "Grant",
    "Job",
    "Release",
    "Removal",
    "Renewal",
    "Reservation",
    "Response",
    "RunConfig",
    "Scheduler",
    "SlotStatus",
    "Status",
    "Trajectory",
    "WeightsRef",
    "load_job",
]
__all__ += errors.__all__
