"""roq: Reserve-Occupy Queue, a staleness-bounded scheduler for asynchronous RL, inside Redis."""

from roq.aclient import AsyncScheduler
from roq.client import Scheduler
from roq.config import Job, RunConfig, load_job
from roq.errors import (
    ConfigError,
    ConfigMismatch,
    Fenced,
    Invalid,
    InvalidTrajectory,
    NotReady,
    Refused,
    RewardError,
    RoqError,
    RunEnded,
    ServerUnavailable,
    StateLost,
    UnknownGroup,
    UnknownRun,
    UnknownWeights,
    UnsuitableServer,
)
from roq.trajectory import Prefix, Trajectory
from roq.types import (
    Batch,
    BatchGroup,
    Completion,
    Grant,
    Renewal,
    Reservation,
    Status,
    WeightsRef,
)

__all__ = [
    "AsyncScheduler",
    "Batch",
    "BatchGroup",
    "Completion",
    "ConfigError",
    "ConfigMismatch",
    "Fenced",
    "Grant",
    "Invalid",
    "InvalidTrajectory",
    "Job",
    "NotReady",
    "Prefix",
    "Refused",
    "Renewal",
    "Reservation",
    "RewardError",
    "RoqError",
    "RunConfig",
    "RunEnded",
    "Scheduler",
    "ServerUnavailable",
    "StateLost",
    "Status",
    "Trajectory",
    "UnknownGroup",
    "UnknownRun",
    "UnknownWeights",
    "UnsuitableServer",
    "WeightsRef",
    "load_job",
]
