"""Every failure roq reports, as one tree.

::

    RoqError
    ├── ConfigError            a configuration that cannot work (exit code 2 on the command line)
    ├── InvalidTrajectory      a payload that breaks its own contract; nothing was sent
    ├── ServerUnavailable      Redis could not be reached within the retry budget
    ├── UnsuitableServer       too old, evicts keys, or holds another roq library than this client needs
    ├── NotAllowed             the server's user may not do this; use one of the right role (roq acl)
    ├── RewardError            a reward function failed or ran out of time
    └── Refused                the server-side library refused; one class for each leading code
        ├── Fenced             ROQ_FENCED        the claim (or the trainer) was superseded
        ├── NotReady           ROQ_NOT_READY     a step out of order, e.g. publish before take
        ├── UnknownRun         ROQ_NO_RUN        nothing was created under this name
        ├── UnknownGroup       ROQ_NO_GROUP      no such group was ever issued
        ├── UnknownWorker      ROQ_NO_WORKER     no such worker is attached
        ├── UnknownWeights     ROQ_NO_WEIGHTS    the weights version is not (or no longer) registered
        ├── ConfigMismatch     ROQ_CONFIG        the run exists with another configuration
        ├── Invalid            ROQ_INVALID       an argument is out of range
        ├── StateLost          ROQ_STATE_LOST    the caller is ahead of what Redis remembers
        └── RunEnded           ROQ_ENDED         all steps are trained or the prompts are used up

Every message is a sentence that says what to do.
"""

from __future__ import annotations

__all__ = [
    "CODES",
    "ConfigError",
    "ConfigMismatch",
    "Fenced",
    "Invalid",
    "InvalidTrajectory",
    "NotAllowed",
    "NotReady",
    "Refused",
    "RewardError",
    "RoqError",
    "RunEnded",
    "ServerUnavailable",
    "StateLost",
    "UnknownGroup",
    "UnknownRun",
    "UnknownWeights",
    "UnknownWorker",
    "UnsuitableServer",
    "refusal",
]


class RoqError(Exception):
    """Base of everything roq raises on purpose."""


class ConfigError(RoqError):
    """A configuration that cannot work; the message names the key and what to write instead."""


class InvalidTrajectory(RoqError, ValueError):
    """A payload whose fields do not fit together, e.g. a log-prob missing for a token."""


class ServerUnavailable(RoqError, ConnectionError):
    """Redis stayed out of reach for the whole retry budget."""


class UnsuitableServer(RoqError):
    """The server cannot hold a run safely: too old, evicting, or without the library this client needs."""


class NotAllowed(RoqError):
    """The user that the URL names may not do this on the server; its role is another one (``roq acl``)."""


class RewardError(RoqError):
    """A reward function raised, timed out or died; never to be trained as a reward of 0."""


class Refused(RoqError):
    """The library inside the server refused the call and changed nothing."""

    code = ""


class Fenced(Refused):
    """The claim's token is old: another worker (or trainer) has taken over. Drop the work."""

    code = "ROQ_FENCED"


class NotReady(Refused):
    """A step out of order, such as publishing a version whose batch was not taken."""

    code = "ROQ_NOT_READY"


class UnknownRun(Refused):
    """No run of this name exists on this server; create it first."""

    code = "ROQ_NO_RUN"


class UnknownGroup(Refused):
    """A group number that was never issued."""

    code = "ROQ_NO_GROUP"


class UnknownWorker(Refused):
    """No worker of this name is attached to the run."""

    code = "ROQ_NO_WORKER"


class UnknownWeights(Refused):
    """The weights version is not registered, or was retired; take the newest instead."""

    code = "ROQ_NO_WEIGHTS"


class ConfigMismatch(Refused):
    """The run exists with another configuration; the message lists the differing keys."""

    code = "ROQ_CONFIG"


class Invalid(Refused):
    """An argument is missing, malformed or out of range."""

    code = "ROQ_INVALID"


class StateLost(Refused):
    """The caller is ahead of the server: Redis lost acknowledged writes."""

    code = "ROQ_STATE_LOST"


class RunEnded(Refused):
    """All steps are trained, or the prompts cannot fill another batch."""

    code = "ROQ_ENDED"


CODES: dict[str, type[Refused]] = {
    cls.code: cls
    for cls in (
        Fenced,
        NotReady,
        UnknownRun,
        UnknownGroup,
        UnknownWorker,
        UnknownWeights,
        ConfigMismatch,
        Invalid,
        StateLost,
        RunEnded,
    )
}


def refusal(message: str) -> Refused:
    """The refusal for an error reply of the library, such as ``ROQ_FENCED the claim was …``."""
    code, _, sentence = message.partition(" ")
    return CODES.get(code, Refused)(sentence or message)
