"""Server users with the least rights that each process of a run needs (``roq acl``).

A function of the library runs its commands with its caller's rights, on Redis and on Valkey. So a role has
three selectors, any of which can permit a command:

1. functions: ``+fcall|roq_reserve``, on the keys of its runs;
2. reads: commands that read, on the keys of its runs;
3. writes: the library's commands that write, only on the keys that the role's functions write.

So a worker can neither call ``roq_publish`` nor write ``weights`` by hand. Rules cannot distinguish a command
inside a function from the same command typed by hand: a worker may write ``state``, since reserving does.
docs/operations.md describes the consequences.

The commands are read from the library's source, so the rules belong to one version of it: generate them again
when the library changes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from roq.config import RUN_NAME
from roq.errors import ConfigError
from roq.protocol import library
from roq.protocol.functions import KEEPERS, ROLES, role_functions
from roq.protocol.keys import NAMES, keys_of

__all__ = [
    "acl_file",
    "password_of",
    "rules",
    "setuser_commands",
    "written_commands",
]

# Keys that a role never writes, by function or by hand. Roles not listed here write nothing.
_NEVER_WRITES: dict[str, tuple[str, ...]] = {
    "owner": (),
    "admin": (),
    "worker": ("config", "weights", "sender", "batches"),
    "trainer": ("config",),
    "operator": ("config", "weights", "sender"),
}

# Connecting (also through Sentinels and in a cluster), ACL WHOAMI, health checks.
# fmt: off
_ANYBODY = (
    "+ping", "+info", "+time", "+select", "+role", "+command", "+readonly", "+asking", "+acl|whoami",
    "+client|setname", "+latency|histogram", "+cluster|slots", "+cluster|shards", "+cluster|nodes",
    "+cluster|myid",
)
_READS = frozenset((
    "EXISTS", "TYPE", "MEMORY|USAGE", "HGET", "HMGET", "HGETALL", "HKEYS", "HVALS", "HLEN", "HSTRLEN",
    "HEXISTS", "HSCAN", "LLEN", "LRANGE", "XLEN", "XRANGE", "XREVRANGE", "XREAD", "XINFO|STREAM", "ZCARD",
    "ZCOUNT", "ZLEXCOUNT", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANGEBYLEX",
    "ZREVRANGEBYSCORE", "ZSCORE", "ZMSCORE", "ZRANK", "ZREVRANK",
))
# A role that may change a key in one way may also change it in others. These never change between versions:
# new rules must also fit the old library, until it is replaced.
_WRITES = frozenset((
    "HSET", "HSETNX", "HDEL", "HINCRBY", "ZADD", "ZREM", "ZINCRBY", "ZPOPMIN", "ZPOPMAX", "ZREMRANGEBYLEX",
    "ZREMRANGEBYRANK", "ZREMRANGEBYSCORE", "LPUSH", "RPUSH", "LPOP", "RPOP", "LREM", "LSET", "LTRIM", "XADD",
    "XTRIM",
))
# In addition to the library's commands: an atomic restore (roq import).
_RESTORES = ["HSET", "ZADD", "RPUSH", "XADD", "DEL", "RENAME", "WATCH"]
_ADMIN_ONLY = ["+function|load", "+function|list", "+multi", "+exec", "+discard", "+unwatch"]
# fmt: on

_PATTERN = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]{0,63}")


def _library_commands() -> set[str]:
    """Every command that the library issues."""
    return set(re.findall(r'(?:redis\.call\(|changes\.later\(|\{)\s*"([A-Z]+)"', library.source()))


def written_commands() -> set[str]:
    """Every command that changes a run: those of the library and those of a restore."""
    return (_library_commands() - _READS - {"TIME"}) | (set(_RESTORES) - {"WATCH"})


def rules(role: str, runs: Sequence[str]) -> list[str]:
    """The rules of a role as words of ``ACL SETUSER``, without the password.

    Args:
        role: one of :data:`ROLES`.
        runs: names of its runs; ``*`` in a name matches any text.

    Raises:
        ConfigError: unknown role, or an invalid run name.
    """
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
    for run in runs:
        if not _PATTERN.fullmatch(run):
            raise ConfigError(f"invalid run name or pattern {run!r}; use a name such as gcd-2 or gcd-*")
    if not runs:
        raise ConfigError("no run given; pass at least one --run NAME")
    words = ["on", "resetchannels", "-@all", *_ANYBODY]
    calls = [
        f"+{'fcall_ro' if function.reads else 'fcall'}|roq_{function.name}"
        for function in role_functions(role)
    ]
    # FCALL requires write access to all its keys, regardless of what the function does with them.
    right = "%R~" if all(function.reads for function in role_functions(role)) else "~"
    words.append(_selector(calls, right, _all_keys(runs)))
    words.append(_selector([f"+{command.lower()}" for command in sorted(_READS)], "%R~", _all_keys(runs)))
    if role in _NEVER_WRITES:
        writes = (_WRITES | _library_commands()) - _READS - {"TIME"}
        allowed = [name for name in NAMES if name not in _NEVER_WRITES[role]]
        keys = [keys_of(run)[name] for run in runs for name in allowed]
        if role in KEEPERS:
            writes |= {*_RESTORES}
            words += _ADMIN_ONLY
            keys = _all_keys(runs)  # an import writes temporary keys first
        words.append(_selector([f"+{command.lower()}" for command in sorted(writes)], "~", keys))
    return words


def _all_keys(runs: Iterable[str]) -> list[str]:
    return [f"roq:{{{run}}}:*" for run in runs]


def _selector(commands: Iterable[str], right: str, patterns: Iterable[str]) -> str:
    return f"({' '.join([*commands, *(right + pattern for pattern in patterns)])})"


def password_of(role: str, folder: Path) -> str:
    """The password in ``folder/role``; a new one is written if there is none (256 bits, mode 0600).

    Raises:
        ConfigError: the file is empty or cannot be read.
    """
    path = folder / role
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(secrets.token_urlsafe(32) + "\n", encoding="utf-8")
    try:
        password = path.read_text(encoding="utf-8").strip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; write the password of role {role} into it") from None
    if not password:
        raise ConfigError(f"{path} is empty; write the password of role {role} into it")
    return password


def _users(
    roles: Iterable[str], runs: Sequence[str], prefix: str, passwords: Path | None
) -> list[tuple[str, list[str]]]:
    if not RUN_NAME.fullmatch(f"{prefix}x"):
        raise ConfigError(f"prefix {prefix!r} must be letters, digits, '.', '_' or '-'")
    roles = list(roles)
    made = {role: rules(role, runs) for role in roles}  # before any password is written
    if passwords is not None:
        for role, words in made.items():
            digest = hashlib.sha256(password_of(role, passwords).encode()).hexdigest()
            words.insert(1, f"#{digest}")
    return [(f"{prefix}{role}", words) for role, words in made.items()]


def acl_file(
    roles: Iterable[str], runs: Sequence[str], prefix: str, passwords: Path | None, *, close_default: bool
) -> list[str]:
    """Lines for the server's ``aclfile``; passwords appear only as SHA-256.

    ``close_default`` disables ``default``, the user of clients that do not log in.
    """
    users = _users(roles, runs, prefix, passwords)
    # Off, so no client can use it. With all rights, because Redis (7.0 and 8.0, not Valkey) replays its
    # append-only file as this user and skips commands that it may not run: a restart would lose the run.
    closing = ["user default off resetpass ~* &* +@all"] if close_default else []
    return [*closing, *(f"user {name} {' '.join(words)}" for name, words in users)]


def setuser_commands(
    roles: Iterable[str], runs: Sequence[str], prefix: str, passwords: Path | None
) -> list[str]:
    """``ACL SETUSER`` commands for ``redis-cli``; each replaces its user."""
    return [
        f"ACL SETUSER {name} reset {' '.join(words)}"
        for name, words in _users(roles, runs, prefix, passwords)
    ]
