"""The scheduler's client: every call is one function of the library inside Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import redis
import tenacity
from redis.exceptions import NoPermissionError

from roq import _functions, _library
from roq._connect import check_url, companions, connect
from roq._operations import Call, Command, Many, Operation, Operations
from roq._session import (
    BLOCK_S,
    FAILURES,
    LANES,
    LIBRARY_MISSING,
    Lanes,
    Stats,
    check_version,
    is_transient,
    replace_library,
    retry_policy,
    translate,
    unanswered,
    who_may,
    wire,
    without_load,
)
from roq.audit import Audit
from roq.config import RunConfig
from roq.errors import Refused
from roq.history import BEGINNING, Event
from roq.trajectory import Prefix, Trajectory
from roq.types import (
    Batch,
    BatchGroup,
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

__all__ = ["Scheduler"]

T = TypeVar("T")


class Scheduler:
    """A run on a Redis server. Safe to share between threads.

    Lost connections are retried with back-off for ``retry_s`` seconds (None: for ever); a retried call
    has one effect. :class:`AsyncScheduler` has the same methods, awaited.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix:///path/to.sock``.
        run: the run's name.
        retry_s: how long to wait for a server that is away.
        stop: set, it ends such a wait at once.

    Raises:
        ConfigError: the URL cannot be understood.
        ServerUnavailable: (any call) the server stayed away for ``retry_s``.
        UnsuitableServer: (any call) the server is too old, or its library newer than this client.
        UnknownRun: (any call but ``create``) the run was not created.
    """

    def __init__(
        self, url: str, run: str, *, retry_s: float | None = 60.0, stop: threading.Event | None = None
    ) -> None:
        self.url = url
        self.run = run
        self.stats = Stats()
        self._operations = Operations(run)
        self._lanes = Lanes()
        self._concurrency = threading.BoundedSemaphore(LANES)
        self._batching = threading.Lock()
        self._policy = lambda: retry_policy(url, retry_s, stop)
        self._acknowledged: dict[str, int] = {}
        self._checked = False
        check_url(url)
        self._client: Any = None
        self._connecting = threading.Lock()

    @property
    def _redis(self) -> Any:
        """The redis-py client, made when first used: one for a cluster connects at once."""
        with self._connecting:
            if self._client is None:
                self._client = connect(self.url)
            return self._client

    def close(self) -> None:
        """Close the connections. Nothing on the server changes."""
        if self._client is not None:
            for client in (self._client, *companions(self._client)):
                client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the wire -----------------------------------------------------------------------------------

    def _ensure_library(self) -> None:
        check_version(self._redis.info("server"))
        version = wire(self._operations, Call(_functions.VERSION, ()), "")
        loaded: str | None = None
        try:
            loaded = self._redis.execute_command(*version).decode()
        except redis.ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        if replace_library(loaded):
            try:
                self._redis.function_load(_library.source(), replace=True)
            except NoPermissionError:
                without_load(loaded)
        self._checked = True

    def _exchange(self, args: tuple[Any, ...]) -> Any:
        if not self._checked:
            self._ensure_library()
        try:
            return self._redis.execute_command(*args)
        except redis.ResponseError as error:
            if LIBRARY_MISSING not in str(error):
                raise
        self._ensure_library()
        return self._redis.execute_command(*args)

    def _exchange_many(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not self._checked:
            self._ensure_library()
        with self._redis.pipeline(transaction=False) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            answers = pipe.execute(raise_on_error=False)
        failure = unanswered(answers)
        if failure is not None:
            self._checked = False  # the library may be what is missing
            raise redis.ConnectionError(f"not all calls were answered: {failure}")
        return answers

    def _persist(self, exchange: Callable[[Any], T], what: Any) -> T:
        """Exchange, and again while the failure is one that passes."""
        try:
            return exchange(what)
        except FAILURES as error:
            if not is_transient(error):
                raise
        return tenacity.Retrying(**self._policy())(exchange, what)

    def _send(self, command: Call | Many | Command) -> Any:
        if isinstance(command, Many):
            with self._batching, self._lanes.hold(len(command.calls)) as requests:
                calls = zip(command.calls, requests, strict=True)
                many = [wire(self._operations, call, request) for call, request in calls]
                return self._persist(self._exchange_many, many)
        with self._concurrency, self._lanes.hold() as (request,):
            return self._persist(self._exchange, wire(self._operations, command, request))

    def _run(self, operation: Operation[T]) -> T:
        """Drive an operation: send what it yields, with retries, until it returns."""
        answer: Any = None
        command: Call | Many | Command | None = None
        started = time.perf_counter()
        with self.stats.count():
            try:
                while True:
                    command = operation.send(answer)
                    answer = self._send(command)
            except StopIteration as done:
                return done.value
            except FAILURES as error:
                raise translate(error, self.url, who_may(command)) from error
            finally:
                self.stats.seconds += time.perf_counter() - started

    # -- the run ------------------------------------------------------------------------------------

    def create(
        self, config: RunConfig, *, settings: Mapping[str, str] | None = None, weights: str | None = None
    ) -> bool:
        """Create the run, or confirm that it exists with this configuration; True when it is new.

        Args:
            config: what the scheduler enforces.
            settings: further facts to keep with the run; their names must hold a dot.
            weights: location of the weights of version 0.

        Raises:
            ConfigMismatch: it exists with another configuration; the differing keys are named.
        """
        return self._run(self._operations.create(config, settings, weights))

    def config(self) -> RunConfig:
        """The configuration that the run was created with, defaults filled in."""
        return self._run(self._operations.config())

    def settings(self) -> dict[str, str]:
        """The further facts that were stored at creation."""
        return self._run(self._operations.settings())

    def pause(self, reason: str = "by hand") -> None:
        """Stop admitting new prompts; what is admitted goes on. The events say why, and who asked."""
        self._run(self._operations.pause(True, reason))

    def resume(self, reason: str = "by hand") -> None:
        """Admit new prompts again."""
        self._run(self._operations.pause(False, reason))

    def dead(self) -> list[DeadLetter]:
        """The prompts that were given up, by ordinal, each with its last error."""
        return self._run(self._operations.dead())

    def revive(self, ordinal: int, reason: str = "by hand") -> None:
        """Put a prompt that was given up back; it is issued before any new one.

        Raises:
            NotReady: it is not a dead letter.
            RunEnded: the run is over.
        """
        self._run(self._operations.revive(ordinal, reason))

    def status(self) -> Status:
        """One consistent picture of the run."""
        return self._run(self._operations.status())

    def verify(self) -> list[str]:
        """The broken invariants of the run, one sentence each; empty when all hold."""
        return self._run(self._operations.verify())

    def audit(self, events: Iterable[Event] | None = None) -> Audit:
        """Replay the event stream of a run that stands still, and compare it with what Redis has.

        The whole history is read: a few seconds for a hundred thousand events, in small commands.

        Args:
            events: replay these instead, of an archive that is up to date.
        """
        return self._run(self._operations.audit(events))

    def events(self, after: str = BEGINNING, *, known: int | None = None, wait_s: float = 0.0) -> list[Event]:
        """The next events, oldest first, at most a thousand; empty when there are none.

        Where events were trimmed since ``after``, a ``gap`` stands for them (:mod:`roq.history`, whose
        ``follow`` and ``read_events`` go on page by page).

        Args:
            after: those after the event of this id.
            known: how many events the run has had up to ``after``; with it, a gap tells its size.
            wait_s: sleep up to so long, at most 2 s, for one to come.
        """
        return self._run(self._operations.events(after, known, min(wait_s, BLOCK_S)))

    def newest_event(self, name: str | None) -> Event | None:
        """The newest event of one kind, such as "publish", or of any (None).

        None when none of the newest 20,000 is of the kind.
        """
        return self._run(self._operations.newest_event(name))

    def call_stats(self) -> dict[str, CallStats]:
        """How long functions held the server: "fcall" those that write, "fcall_ro" those that read.

        All functions of all runs together: the server does not tell them apart. Not for a cluster.
        """
        return self._run(self._operations.call_stats())

    def slots(self) -> list[SlotStatus]:
        """Every filled slot and every group in training, in order.

        Read in several steps: a group that moves meanwhile may be missing. :meth:`status` is one picture.
        """
        return self._run(self._operations.slots())

    def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        """Sleep until something changed after ``signal`` or the time is up; returns the newest signal.

        What counts is room for work and new weights or, with ``batch``, a READY buffer; and in both cases
        the end of the run. The two kinds of signal are numbered apart. Not counted in ``stats``.
        """
        keys = self._operations.keys
        stream, field = ("ready", "ready_signal") if batch else ("signals", "signal")
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                block = max(1, round(min(left, BLOCK_S) * 1000))
                read = ("XREAD", "BLOCK", block, "STREAMS", keys[stream], f"{signal}-0")
                if self._persist(self._exchange, read):
                    newest = ("HGET", keys["state"], field)
                    return int(self._persist(self._exchange, newest))
        except FAILURES as error:
            raise translate(error, self.url) from error
        return signal

    # -- workers ------------------------------------------------------------------------------------

    def reserve(self, worker: str, version: int, limit: int) -> Grant:
        """Ask for up to ``limit`` trajectories to generate.

        Args:
            worker: unique for each process start; its lease is extended.
            version: the weights version that the engine really has loaded.
            limit: places that the engine has free now.
        """
        return self._run(self._operations.reserve(worker, version, limit))

    def complete(self, reservation: Reservation, payload: Trajectory) -> Completion:
        """Hand in a finished trajectory.

        Raises:
            Fenced: the claim was superseded; drop the work.
            Invalid: a segment is older than the claim or newer than what is published.
        """
        return self._run(self._operations.complete(reservation, payload))

    def complete_many(self, finished: Sequence[tuple[Reservation, Trajectory]]) -> list[Completion | Refused]:
        """Hand in several finished trajectories with few round trips.

        Each is a transition of its own: the answers come in order, and what would be raised for one
        (``Fenced``, ``Invalid``) is returned in its place.
        """
        return self._run(self._operations.complete_many(finished))

    def members(self, group: int) -> list[Trajectory]:
        """The complete trajectories of a group, in the order of its members: what ``finish`` is about.

        Raises:
            Fenced: the group has left the run.
        """
        return self._run(self._operations.members(group))

    def finish(
        self,
        reservation: Reservation,
        *,
        keep: bool = True,
        reason: str = "",
        advantages: Sequence[float] | None = None,
    ) -> Completion:
        """Hand in the post-processing of a group; the group is placed, or filtered.

        Args:
            reservation: the claim on it (member 0), from ``complete`` or ``reserve``.
            keep: False takes the group out of the run. reason: why, for people.
            advantages: one for each complete member, in order; None leaves them to the trainer.

        Raises:
            Fenced: the claim was superseded.
            Invalid: not one finite advantage for each member.
        """
        return self._run(self._operations.finish(reservation, keep, reason, advantages))

    def release(
        self,
        reservation: Reservation,
        prefix: Prefix | None = None,
        reason: str = "detach",
        error: str | None = None,
    ) -> Release:
        """Give a claim back unfinished.

        Args:
            reservation: the claim.
            prefix: the tokens so far, for another worker to continue.
            reason: "error" counts against ``max_attempts`` and starts the next attempt clean; anything
                else does not.
            error: the error's text, kept for people.

        Raises:
            Fenced: the claim was superseded.
        """
        return self._run(self._operations.release(reservation, prefix, reason, error))

    def save_prefix(self, reservation: Reservation, prefix: Prefix) -> None:
        """Keep the tokens so far, and the claim.

        Raises:
            Fenced: the claim was superseded; stop generating.
        """
        self._run(self._operations.save_prefix(reservation, prefix))

    def renew(
        self, worker: str, version: int | None = None, info: Mapping[str, object] | None = None
    ) -> Renewal:
        """A worker's heartbeat: extend the lease of everything it holds, and registers it.

        Args:
            worker: who.
            version: the weights version it has loaded.
            info: what it says of itself, shown in the status.
        """
        acknowledged = self._acknowledged.get(worker, 0)
        renewal = self._run(self._operations.renew(worker, version, info, acknowledged))
        self._acknowledged[worker] = renewal.acknowledge
        return renewal

    def drain(self, worker: str, reason: str = "by hand") -> int:
        """Ask a worker to go: it gets no more work, ends what it has, and leaves.

        Returns: the claims that it still holds.

        Raises:
            UnknownWorker: no such worker is attached.
        """
        return self._run(self._operations.drain(worker, reason))

    def leave(self, worker: str) -> None:
        """The worker goes; claims it still holds are issued to others."""
        self._run(self._operations.leave(worker))

    def pin(self, worker: str, version: int | None = None) -> WeightsRef:
        """Protect a version's files (default: the newest) while this worker loads and uses them.

        Raises:
            UnknownWeights: they are not registered, or were retired.
        """
        return self._run(self._operations.pin(worker, version))

    def drop(self, group: int, reason: str) -> Removal:
        """Take an unfinished group out of the run.

        Raises:
            NotReady: it is finished or in training.
            Fenced: it has left the run.
        """
        return self._run(self._operations.drop(group, reason))

    def filter(self, group: int, reason: str) -> Removal:
        """Take a finished group out of the run.

        Raises:
            NotReady: it is unfinished or in training.
            Fenced: it has left the run.
        """
        return self._run(self._operations.filter(group, reason))

    # -- the trainer --------------------------------------------------------------------------------

    def take(self, trainer: str, version: int | None = None) -> Batch | None:
        """The batch for the next update, or None while it is not READY.

        Args:
            trainer: unique for each process start; a new one takes over and fences the old.
            version: updates that the trainer's weights have had (default: the published version). When
                it is older, the batch trained then is handed out again.

        Raises:
            RunEnded: all steps are trained, or the prompts cannot fill another batch.
            Fenced: another trainer has taken over.
            StateLost: the trainer is ahead of the server, or behind what it keeps.
        """
        return self._run(self._operations.take(trainer, version))

    def payloads(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
        """The trajectories of some groups of a batch, by group and member.

        Raises:
            StateLost: they are not on the server any more.
        """
        return self._run(self._operations.payloads(groups))

    def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Announce weights whose files are complete. Harmless to repeat.

        Args:
            version: the taken batch's version plus 1. weights: where the files are.
            trainer: who. metrics: figures about the step, kept with its event for those who look at the run.

        Raises:
            NotReady: the batch of this update was not taken.
            Fenced: another trainer has taken over.
        """
        self._run(self._operations.publish(version, weights, trainer, metrics))

    def serve(self, address: str, trainer: str) -> None:
        """Announce where the trainer sends weights from; ``pin`` tells workers. "" for nowhere any more.

        It holds until another trainer takes over.

        Raises:
            NotReady: no batch was taken yet.
            Fenced: another trainer has taken over.
        """
        self._run(self._operations.serve(address, trainer))

    def checkpointed(self, version: int, trainer: str) -> None:
        """Announce a durable checkpoint; earlier batches are freed.

        Raises:
            NotReady: the version is not published.
            Fenced: another trainer has taken over.
        """
        self._run(self._operations.checkpointed(version, trainer))

    def weights(self) -> list[WeightsRef]:
        """The registered weights, oldest first."""
        return self._run(self._operations.weights())

    def retire_weights(self, trainer: str, keep: int) -> list[WeightsRef]:
        """Unregister weights that nobody needs, all but the ``keep`` newest; then delete their files.

        Raises:
            Fenced: another trainer has taken over.
        """
        return self._run(self._operations.retire_weights(trainer, keep))
