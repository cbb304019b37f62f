"""Every error roq raises on purpose. Each message says what is wrong, then what to do.

This is the whole tree: no other module defines a subclass of :class:`RoqError`
(tests/project/test_errors.py), so a process reports any of them with :func:`roq.processes.report_error`.
"""

from __future__ import annotations

from typing import ClassVar


class RoqError(Exception):
    """Base of everything roq raises on purpose.

    Attributes:
        exit_code: of a process that ends with this error. 2: the same input can never work, so starting
            again is pointless; 1: anything else.
    """

    exit_code: ClassVar[int] = 1


# ---- input ---------------------------------------------------------------------------------------


class ConfigError(RoqError):
    """An invalid configuration or argument; the message names the key and what to write instead."""

    exit_code = 2


class InvalidTrajectory(RoqError, ValueError):
    """A payload with inconsistent fields, such as a token without a log-prob. Nothing was sent."""

    exit_code = 2


# ---- server --------------------------------------------------------------------------------------


class ServerUnavailable(RoqError, ConnectionError):
    """Redis could not be reached within the retry budget."""


class UnsuitableServer(RoqError):
    """The server is too old, may evict keys, or lacks the library that this client needs."""

    exit_code = 2


class NotAllowed(RoqError):
    """The server's user may not do this; use a user of the right role (``roq acl``)."""

    exit_code = 2


class ServerFailed(RoqError):
    """The embedded server could not be started or stopped; the message ends with its last log lines."""


# ---- refusals: one class for each code of lua/lib/refuse.lua -----------------------------------------


class Refused(RoqError):
    """The library inside the server refused the call and changed nothing.

    Attributes:
        code: the first word of the server's error reply.
    """

    code: ClassVar[str] = ""


class Fenced(Refused):
    """The claim's token is old: another worker (or trainer) has taken over. Drop the work."""

    code = "ROQ_FENCED"


class NotReady(Refused):
    """A step out of order, such as publishing a version whose batch was not taken."""

    code = "ROQ_NOT_READY"


class UnknownRun(Refused):
    """No run of this name exists on this server; create it first."""

    code = "ROQ_NO_RUN"
    exit_code = 2


class UnknownGroup(Refused):
    """A group number that was never issued."""

    code = "ROQ_NO_GROUP"
    exit_code = 2


class UnknownWorker(Refused):
    """No worker of this name is attached to the run."""

    code = "ROQ_NO_WORKER"
    exit_code = 2


class UnknownWeights(Refused):
    """The weights version is not registered, or was retired; take the newest instead."""

    code = "ROQ_NO_WEIGHTS"


class ConfigMismatch(Refused):
    """The run exists with another configuration; the message lists the differing keys."""

    code = "ROQ_CONFIG"
    exit_code = 2


class Invalid(Refused):
    """An argument is missing, malformed or out of range."""

    code = "ROQ_INVALID"
    exit_code = 2


class StateLost(Refused):
    """The caller is ahead of the server: Redis lost acknowledged writes."""

    code = "ROQ_STATE_LOST"


class RunEnded(Refused):
    """All steps are trained, or the prompts cannot fill another batch."""

    code = "ROQ_ENDED"


class Damaged(Refused):
    """The keys of the run hold what the library never writes; restore it from a backup."""

    code = "ROQ_DAMAGED"


# ---- processes of a run --------------------------------------------------------------------------


class RunIncomplete(RoqError):
    """The run stopped before its goal; the message says why, counts its prompts, and says how to continue."""


class ProcessFailed(RoqError):
    """A process failed too often in a row; the message ends with the last lines of its log."""


class RewardError(RoqError):
    """A reward function raised, timed out or died; never trained as a reward of 0."""


class EngineError(RoqError):
    """vLLM did not start, failed or died; its work in flight is lost to this worker."""


class Stalled(RoqError):
    """The trainer waited for a batch longer than the job allows: no live worker, or no progress."""


class CheckpointDamaged(RoqError):
    """No checkpoint can be resumed from: files are missing or differ from what was saved."""

    exit_code = 2


class Diverged(RoqError):
    """The gradient is not finite; training on would publish broken weights."""


class SequenceTooLong(RoqError):
    """A trajectory does not fit ``trainer.max_seq_tokens``."""

    exit_code = 2


class PeerFailed(RoqError):
    """Rank 0 failed; it reports the cause itself."""


# ---- weights -------------------------------------------------------------------------------------


class WeightsError(RoqError):
    """Published weights cannot be loaded; the engine keeps the weights it had before."""


class StoreFailed(RoqError):
    """A weight store is unreachable, refused a request, or returned data other than what was stored."""


class VersionLost(StoreFailed):
    """The store has no such version, or an incomplete one; retrying does not help."""


class TransferFailed(RoqError):
    """Weights did not arrive over the network; read their files instead."""


class SenderSilent(TransferFailed):
    """The weight sender does not answer; an immediate retry would only time out again."""


# --------------------------------------------------------------------------------------------------

CODES: dict[str, type[Refused]] = {cls.code: cls for cls in Refused.__subclasses__()}

# Derived, so a new error is declared once.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, item in list(globals().items()) if isinstance(item, type) and issubclass(item, RoqError)
]


def is_refusal(message: str) -> bool:
    """True for an error reply of the library, as opposed to one of the server."""
    return message.startswith("ROQ_")


def refusal(message: str) -> Refused:
    """The refusal for an error reply of the library, such as ``ROQ_FENCED the claim was …``."""
    code, _, sentence = message.partition(" ")
    return CODES.get(code, Refused)(sentence or message)
