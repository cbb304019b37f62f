"""The functions of the library and their arguments, declared once for both clients.

The same declarations stand in ``lua/functions``, one file each; tests/protocol/test_contract.py holds
the two together, headers included.
"""

from __future__ import annotations

import msgspec

__all__ = ["FUNCTIONS", "Function"]


class Function(msgspec.Struct, frozen=True):
    """A function of the library.

    Attributes:
        name: without the prefix ``roq_``.
        arguments: ``name:kind`` in order, without the request identity.
        once: it takes a request identity first, so that a retry has one effect.
        reads: it writes nothing.
    """

    name: str
    arguments: tuple[str, ...] = ()
    once: bool = False
    reads: bool = False


_CLAIM = ("group:integer", "member:integer", "token:integer", "worker:name")

CREATE = Function("create", ("config:bytes", "weights:text"))
RESERVE = Function("reserve", ("worker:name", "version:integer", "limit:integer"), once=True)
RENEW = Function("renew", ("worker:name", "version:optional", "info:text", "acknowledged:integer"))
COMPLETE = Function(
    "complete",
    (*_CLAIM, "reward:float", "tokens:integer", "oldest:integer", "newest:integer", "payload:bytes"),
    once=True,
)
FINISH = Function(
    "finish",
    ("group:integer", "token:integer", "worker:name", "keep:integer", "reason:text", "advantages:text"),
    once=True,
)
RELEASE = Function("release", (*_CLAIM, "failed:integer", "reason:text", "prefix:bytes"), once=True)
SAVE_PREFIX = Function("save_prefix", (*_CLAIM, "prefix:bytes"))
DRAIN = Function("drain", ("worker:name", "reason:text", "by:text"))
LEAVE = Function("leave", ("worker:name",))
PIN = Function("pin", ("worker:name", "version:optional"))
TAKE = Function("take", ("trainer:name", "version:optional"))
PUBLISH = Function("publish", ("trainer:name", "version:integer", "weights:text", "metrics:text"))
SERVE = Function("serve", ("trainer:name", "address:text"))
CHECKPOINTED = Function("checkpointed", ("trainer:name", "version:integer"))
RETIRE_WEIGHTS = Function("retire_weights", ("trainer:name", "keep:integer"))
DROP = Function("drop", ("group:integer", "reason:text", "by:text"), once=True)
FILTER = Function("filter", ("group:integer", "reason:text", "by:text"), once=True)
REVIVE = Function("revive", ("ordinal:integer", "reason:text", "by:text"), once=True)
PAUSE = Function("pause", ("paused:integer", "reason:text", "by:text"))
STATUS = Function("status", reads=True)
VERIFY = Function("verify", reads=True)
VERSION = Function("version", reads=True)

FUNCTIONS = (
    CREATE,
    RESERVE,
    RENEW,
    COMPLETE,
    FINISH,
    RELEASE,
    SAVE_PREFIX,
    DRAIN,
    LEAVE,
    PIN,
    TAKE,
    PUBLISH,
    SERVE,
    CHECKPOINTED,
    RETIRE_WEIGHTS,
    DROP,
    FILTER,
    REVIVE,
    PAUSE,
    STATUS,
    VERIFY,
    VERSION,
)
