"""The functions of the library and the roles that may call them, for both clients and the ACL rules.

A function's arguments are declared in its Lua file; tests/protocol/test_contract.py compares the client's
calls with them.
"""

from __future__ import annotations

import msgspec

__all__ = ["FUNCTIONS", "KEEPERS", "ROLES", "Function", "role_functions", "roles_for"]

ROLES = ("admin", "worker", "trainer", "operator", "board", "owner")
"""Roles, one server user each (``roq acl``).

admin creates runs, loads the library, backs up and restores; worker and trainer are the two processes;
operator controls a run by hand; board only reads (status, watch, board, metrics, doctor). owner may call
everything: for ``roq up``, which starts every process under one user, on a shared server.
"""

KEEPERS = ("admin", "owner")
"""Roles that load the library, back up and restore."""


class Function(msgspec.Struct, frozen=True):
    """A function of the library.

    Attributes:
        name: without the prefix ``roq_``.
        roles: may call it, in addition to owner.
        once: its first argument is a request identity, so a retry has one effect.
        reads: it writes nothing.
    """

    name: str
    roles: tuple[str, ...]
    once: bool = False
    reads: bool = False


CREATE = Function("create", ("admin",))
CONFIGURE = Function("configure", ("admin",))
RESERVE = Function("reserve", ("worker",), once=True)
RENEW = Function("renew", ("worker",))
COMPLETE = Function("complete", ("worker",), once=True)
JUDGE = Function("judge", ("worker",), once=True)
RELEASE = Function("release", ("worker",), once=True)
FAIL = Function("fail", ("worker",), once=True)
SAVE_PREFIX = Function("save_prefix", ("worker",))
DRAIN = Function("drain", ("operator",))
LEAVE = Function("leave", ("worker",))
PIN = Function("pin", ("worker",))
TAKE = Function("take", ("trainer",))
PUBLISH = Function("publish", ("trainer",))
ANNOUNCE_SENDER = Function("announce_sender", ("trainer",))
CHECKPOINTED = Function("checkpointed", ("trainer",))
RETIRE_WEIGHTS = Function("retire_weights", ("trainer",))
DROP = Function("drop", ("trainer", "operator"), once=True)
FILTER = Function("filter", ("trainer", "operator"), once=True)
REJECT = Function("reject", ("trainer", "operator"), once=True)
REVIVE = Function("revive", ("operator",), once=True)
PAUSE = Function("pause", ("operator",))
RESUME = Function("resume", ("operator",))
STATUS = Function("status", ROLES, reads=True)
VERIFY = Function("verify", ROLES, reads=True)
VERSION = Function("version", ROLES, reads=True)

FUNCTIONS = tuple(found for found in list(globals().values()) if isinstance(found, Function))


def role_functions(role: str) -> tuple[Function, ...]:
    """The functions that a role may call."""
    return tuple(f for f in FUNCTIONS if role == "owner" or role in f.roles)


def roles_for(function: Function) -> list[str]:
    """The roles that may call a function."""
    return [role for role in ROLES if function in role_functions(role)]
