"""What both drivers share: request identities, errors, retry policy, checks of the server."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, TypeVar

import tenacity
from redis import exceptions as rx

from roq.client.connect import masked, tls_trouble
from roq.client.operations import Call, Command, Many, Operations
from roq.errors import (
    CODES,
    ConfigError,
    NotAllowed,
    RoqError,
    ServerUnavailable,
    UnsuitableServer,
    refusal,
)
from roq.protocol import library
from roq.protocol.functions import KEEPERS, ROLES, roles_for

__all__ = [
    "FAILURES",
    "LANES",
    "LIBRARY_MISSING",
    "Lanes",
    "Stats",
    "Timed",
    "check_version",
    "is_transient",
    "replace_library",
    "retry_policy",
    "translate",
    "unanswered",
    "who_may",
    "wire",
    "without_load",
]

log = logging.getLogger("roq")
T = TypeVar("T")

LANES = 64  # for single calls, and as many for a batch of calls: together those of lua/lib/replies.lua

# Error classes that pass by themselves: the server is away, loading, failing over or full.
_TRANSIENT = (
    rx.ConnectionError,
    rx.TimeoutError,
    rx.BusyLoadingError,
    rx.ReadOnlyError,
    rx.ClusterDownError,
    rx.MasterDownError,
    rx.TryAgainError,
    rx.OutOfMemoryError,
    rx.RedisClusterException,
)
# And by their leading code: a script of somebody else runs too long, the disk is full, replicas are missing.
_TRANSIENT_CODES = ("BUSY ", "MISCONF ", "NOREPLICAS ", "LOADING ", "OOM ")
FAILURES = (rx.RedisError, rx.RedisClusterException)  # the latter is no RedisError
LIBRARY_MISSING = "unction not found"  # the start of this text differs between servers
# A command inside a function that the caller's own rules forbid: Redis, Valkey.
_INNER_REFUSALS = ("The user executing the script can't", "ACL failure in script")
_LOAD_IT = (
    "run `roq library | redis-cli -x FUNCTION LOAD REPLACE` (or any roq command) as an administrator "
    f"(role {' or '.join(KEEPERS)} of roq acl)"
)


class Stats:
    """What the calls of a client cost; waiting for signals is not counted.

    Attributes:
        calls: calls made.
        seconds: wall time that they took from the caller. A call of ``Scheduler`` takes all of its time;
            one of ``AsyncScheduler`` takes what it runs on the event loop, which does other things while
            the answer is on its way.
        under_way_s: wall time during which at least one call was waiting for its answer.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.under_way_s = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def count(self) -> Generator[None]:
        """Count the call made inside."""
        with self._lock:
            self.calls += 1
            self._under_way += 1
            if self._under_way == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self.under_way_s += time.perf_counter() - self._since


class Timed(Awaitable[T]):
    """A coroutine whose turns on the event loop are timed."""

    def __init__(self, work: Coroutine[Any, Any, T], stats: Stats) -> None:
        self._work = work
        self._stats = stats

    def __await__(self) -> Generator[Any, Any, T]:
        """Pass everything on; add up the time between being resumed and giving way."""
        turns = self._work.__await__()
        step: Callable[[], Any] = lambda: next(turns)  # noqa: E731 - replaced at every turn
        while True:
            started = time.perf_counter()
            try:
                waiting_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self._stats.seconds += time.perf_counter() - started
            try:
                yield waiting_for
            except BaseException as error:  # noqa: BLE001 - a cancellation belongs to the coroutine
                step = partial(turns.throw, error)
            else:
                step = partial(next, turns)


class Lane:
    """One call at a time: its number and the number of its current call."""

    __slots__ = ("number", "sequence")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0


class Lanes:
    """A client's lanes (lua/lib/replies.lua). A lane is held for one call, retries included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self.client = uuid.uuid4().hex
        self._free: list[Lane] = []
        self._made = 0

    @contextmanager
    def hold(self, calls: int = 1) -> Generator[list[str]]:
        """Identities of new calls. The caller keeps at most ``LANES`` single calls and a batch in flight."""
        with self._lock:
            if self._process != os.getpid():  # a fork is another client
                self._begin()
            lanes = [self._free.pop() for _ in range(min(calls, len(self._free)))]
            while len(lanes) < calls:
                self._made += 1
                lanes.append(Lane(self._made))
        for lane in lanes:
            lane.sequence += 1
        try:
            yield [f"{self.client} {lane.number} {lane.sequence}" for lane in lanes]
        finally:
            with self._lock:
                self._free += lanes


def wire(operations: Operations, command: Call | Command, request: str) -> tuple[str | bytes | int, ...]:
    """The Redis command for an operation's step."""
    if isinstance(command, Command):
        return command.args
    function = command.function
    keys = operations.packed_keys
    return (
        "FCALL_RO" if function.reads else "FCALL",
        f"roq_{function.name}",
        len(keys),
        *keys,
        *((request,) if function.once else ()),
        *command.values,
    )


def unanswered(answers: list[Any]) -> Exception | None:
    """The first answer of a batch that is no answer: a failure that passes, or a missing library."""
    for answer in answers:
        if isinstance(answer, Exception) and (is_transient(answer) or LIBRARY_MISSING in str(answer)):
            return answer
    return None


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError) or tls_trouble(error):
        return False
    return isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_CODES)


def who_may(command: Call | Many | Command | None) -> Sequence[str]:
    """The roles that may send a command; all of them may read."""
    if isinstance(command, Call):
        return roles_for(command.function)
    if isinstance(command, Many):
        return roles_for(command.calls[0].function)
    return list(ROLES)


def translate(error: Exception, url: str, roles: Sequence[str] = tuple(ROLES)) -> RoqError:
    """The roq error for a redis-py one; ``roles`` are those that may do what was tried."""
    url = masked(url)
    message = str(error)
    if message.partition(" ")[0] in CODES:
        return refusal(message)
    if why := tls_trouble(error):
        return ConfigError(f"no connection to Redis at {url}: {why}")
    if is_transient(error):
        return ServerUnavailable(f"Redis at {url} stayed out of reach: {message}")
    if isinstance(error, rx.NoPermissionError):
        of = f"role {' or '.join(roles)}" if len(roles) < len(ROLES) else "any role"
        return NotAllowed(
            f"the user of Redis at {url} may not do this: {message}; "
            f"use a user of {of} with rules for this run (roq acl)"
        )
    if any(text in message for text in _INNER_REFUSALS):
        return NotAllowed(
            f"the user of Redis at {url} may call this function but not all that it does: {message}; its "
            "rules are of another version of roq, make them anew with roq acl"
        )
    if isinstance(error, rx.AuthenticationError | rx.AuthorizationError):
        return ConfigError(
            f"Redis at {url} refused the login: {message}; correct the URL's user or its password"
        )
    if LIBRARY_MISSING in message:
        return UnsuitableServer(f"the roq library of Redis at {url} lacks what this client calls; {_LOAD_IT}")
    return RoqError(f"Redis at {url} failed: {message}")


class Policy(TypedDict):
    """Arguments of tenacity's ``Retrying`` and ``AsyncRetrying``."""

    retry: tenacity.retry_if_exception
    wait: Any
    stop: Any
    before_sleep: Any
    reraise: bool


def retry_policy(url: str, retry_s: float | None, stop: threading.Event | None = None) -> Policy:
    """Back off with jitter for at most ``retry_s`` seconds (None: for ever) or until ``stop`` is set, saying
    what is waited for."""
    next_word = 0.5  # a blip is nobody's concern

    def say(state: tenacity.RetryCallState) -> None:
        nonlocal next_word
        elapsed = state.seconds_since_start or 0.0
        if elapsed >= next_word:
            next_word = elapsed + 5.0
            error = state.outcome.exception() if state.outcome else None
            log.warning("waiting for Redis at %s since %.0f s: %s", masked(url), elapsed, error)

    ends = [] if retry_s is None else [tenacity.stop_after_delay(retry_s)]
    ends += [] if stop is None else [tenacity.stop_when_event_set(stop)]
    return {
        "retry": tenacity.retry_if_exception(is_transient),
        "wait": tenacity.wait_random_exponential(multiplier=0.05, max=2.0),
        "stop": tenacity.stop_any(*ends),
        "before_sleep": say,
        "reraise": True,
    }


def replace_library(loaded: str | None) -> bool:
    """Whether our library must be loaded over what the server has.

    Raises:
        UnsuitableServer: the server has a newer library than this client understands.
    """
    if loaded is None:
        return True
    older = library.older_than_ours(loaded)
    if older is False:
        raise UnsuitableServer(
            f"the server has roq library {loaded}, this client has {library.version()}; upgrade the client"
        )
    return older is True


def without_load(loaded: str | None) -> None:
    """Go on, if that can work, with what the server has: our user may not load the library.

    Raises:
        UnsuitableServer: the server has no library, or one too old for this client.
    """
    ours = library.version()
    if loaded is None:
        raise UnsuitableServer(f"the server has no roq library, and this user may not load it; {_LOAD_IT}")
    if loaded.split(maxsplit=1)[0] != ours.split(maxsplit=1)[0]:
        raise UnsuitableServer(
            f"the server has roq library {loaded}, this client needs {ours}, and this user may not load it; "
            f"{_LOAD_IT} of this client's version"
        )
    log.warning(
        "the server has roq library %s, this client %s: of one revision, so they work together", loaded, ours
    )


def check_version(info: dict[str, Any]) -> None:
    """Refuse a server without functions.

    Raises:
        UnsuitableServer: it is older than Redis 7.0 or Valkey 7.2.
    """
    if "redis_version" not in info and info:  # a cluster answers for each node
        info = next(iter(info.values()))
    version = str(info.get("redis_version", "0"))
    if int(version.split(".", maxsplit=1)[0]) < 7:
        raise UnsuitableServer(f"this is Redis {version}; roq needs Redis 7.0 or Valkey 7.2, or newer")
