"""The blocking client of a run, for workers, the trainer and operators.

Each method runs the operation of the same name in :mod:`roq.client.operations`; one that changes the run
calls the function of the same name in ``lua/functions``. :mod:`roq.client.driver` sends it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from roq.client.driver import Driver
from roq.client.operations import Operations
from roq.config import RunConfig
from roq.errors import Refused
from roq.events.audit import Audit
from roq.events.event import BEGINNING, Event
from roq.trajectory import Response, Trajectory
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


class Scheduler:
    """A run on a Redis server. Safe to share between threads.

    A worker reserves trajectories and completes them; the trainer takes a full batch and publishes the
    weights trained on it::

        sched = Scheduler("redis://localhost", "demo")
        sched.create(RunConfig(eta=1, batch_size=2))
        grant = sched.reserve("worker-1", version=0, limit=2)
        for claim in grant.reservations:
            # generate from prompt number claim.ordinal, then score the response
            spans = [(grant.version, 2)]  # both tokens were sampled by these weights
            sched.complete(claim, Trajectory([1, 2], [7, 9], [-0.1, -0.3], spans, reward=1.0))
        batch = sched.take("trainer-1")  # None until a batch is READY
        sched.publish(batch.version + 1, "weights/v1", "trainer-1")

    Lost connections are retried with back-off for ``retry_s`` seconds (None: forever); a retried call
    has one effect. :class:`AsyncScheduler` has the same methods, awaited.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix:///path/to.sock``; ``redis+sentinel://`` and
            ``redis+cluster://`` (docs/deploy.md).
        run: the run's name.
        retry_s: how long to wait for an unreachable server.
        stop: ends such a wait at once when set.

    Attributes:
        url, run: as given.
        stats: the cost of the calls so far (:class:`roq.client.stats.Stats`).

    Raises:
        ConfigError: the URL is invalid.
        ServerUnavailable: (any call) the server was unreachable for ``retry_s``.
        UnsuitableServer: (any call) the server is too old, or its library newer than this client.
        UnknownRun: (any call but ``create``) the run was not created.
    """

    def __init__(
        self, url: str, run: str, *, retry_s: float | None = 60.0, stop: threading.Event | None = None
    ) -> None:
        self.url = url
        self.run = run
        self._operations = Operations(run)
        self._driver = Driver(url, self._operations, retry_s, stop)
        self.stats = self._driver.stats
        self._acknowledged: dict[str, int] = {}

    def close(self) -> None:
        """Close the connections. Nothing on the server changes."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the run ------------------------------------------------------------------------------------

    def create(
        self, config: RunConfig, *, settings: Mapping[str, str] | None = None, weights: str | None = None
    ) -> bool:
        """Create the run, or confirm that it exists with this configuration; True when it is new.

        Args:
            config: the rules that the scheduler enforces.
            settings: further settings to store with the run; their names must contain a dot.
            weights: location of the weights of version 0.

        Raises:
            ConfigMismatch: it exists with another configuration; the message lists the differing keys.
        """
        return self._driver.run(self._operations.create(config, settings, weights))

    def config(self) -> RunConfig:
        """The configuration that the run was created with, defaults filled in."""
        return self._driver.run(self._operations.config())

    def settings(self) -> dict[str, str]:
        """The further settings stored at creation."""
        return self._driver.run(self._operations.settings())

    def configure(self, changes: Mapping[str, str]) -> int:
        """Change settings of the run; processes read them when they start. Returns how many were different.

        The event records the old and the new values and the user. A run that had ended continues if it has
        more steps or epochs now.

        Args:
            changes: stored text by name, such as ``{"trainer.lr": "1e-06", "total_steps": "40"}``; "" takes a
                value away.

        Raises:
            ConfigMismatch: one of them defines the run and cannot be changed.
        """
        return self._driver.run(self._operations.configure(changes))

    def pause(self, reason: str = "by hand") -> None:
        """Stop admitting new prompts; work in flight continues. The event records the reason and the user."""
        self._driver.run(self._operations.pause(reason))

    def resume(self, reason: str = "by hand") -> None:
        """Admit new prompts again."""
        self._driver.run(self._operations.resume(reason))

    def dead(self) -> list[DeadLetter]:
        """The dead letters: prompts that failed too often, by ordinal, each with its last error."""
        return self._driver.run(self._operations.dead())

    def revive(self, ordinal: int, reason: str = "by hand") -> None:
        """Put a dead-lettered prompt back; it is issued before any new one.

        Raises:
            NotReady: it is not a dead letter.
            RunEnded: the run is over.
        """
        self._driver.run(self._operations.revive(ordinal, reason))

    def drain(self, worker: str, reason: str = "by hand") -> int:
        """Drain a worker: it gets no new work, finishes what it has and leaves.

        Returns: the number of claims that it still holds.

        Raises:
            UnknownWorker: no such worker is attached.
        """
        return self._driver.run(self._operations.drain(worker, reason))

    def drop(self, group: int, reason: str) -> Removal:
        """Take an unfinished group out of the run.

        Raises:
            NotReady: it is finished or in training.
            Fenced: it has left the run.
        """
        return self._driver.run(self._operations.drop(group, reason))

    def filter(self, group: int, reason: str) -> Removal:
        """Take a finished group out of the run.

        Raises:
            NotReady: it is unfinished or in training.
            Fenced: it has left the run.
        """
        return self._driver.run(self._operations.filter(group, reason))

    def reject(self, group: int, reason: str) -> Removal:
        """Take a finished group that cannot be trained out of the run, even from the batch in training.

        That batch returns to its slots, and is taken again once another group has filled the place. A trainer
        that is working on it cannot publish it any more. The prompt is requeued or discarded, as ``on_drop``
        says.

        Raises:
            NotReady: it is unfinished, or was trained already.
            Fenced: it has left the run.
        """
        return self._driver.run(self._operations.reject(group, reason))

    def status(self) -> Status:
        """A consistent snapshot of the run."""
        return self._driver.run(self._operations.status())

    def verify(self) -> list[str]:
        """The broken invariants of the run, one sentence each; empty when all hold."""
        return self._driver.run(self._operations.verify())

    # -- observing ----------------------------------------------------------------------------------

    def audit(self, events: Iterable[Event] | None = None) -> Audit:
        """Replay the event stream of an idle run and compare the result with the state in Redis.

        It reads the whole history in small commands: a few seconds for a hundred thousand events.

        Args:
            events: replay these instead, from an up-to-date archive.
        """
        return self._driver.run(self._operations.audit(events))

    def events(self, after: str = BEGINNING, *, known: int | None = None, wait_s: float = 0.0) -> list[Event]:
        """The next events, oldest first, at most a thousand; empty when there are none.

        If events after ``after`` were trimmed, a ``gap`` event stands for them (:mod:`roq.events.event`).
        ``follow`` and ``read_events`` of :mod:`roq.events.follow` read page after page.

        Args:
            after: the id of the last event already read.
            known: the number of events up to ``after``; with it, a gap carries its size.
            wait_s: how long to wait for an event, at most 2 s.
        """
        return self._driver.run(self._operations.events(after, known, wait_s))

    def newest_event(self, name: str | None) -> Event | None:
        """The newest event of one kind, such as "publish", or of any kind (None).

        Returns: None if none of the newest 20,000 events is of that kind.
        """
        return self._driver.run(self._operations.newest_event(name))

    def slots(self) -> list[SlotStatus]:
        """Every filled slot and every group in training, in order.

        Read in several steps: a group that moves between them may be missing. :meth:`status` is consistent.
        """
        return self._driver.run(self._operations.slots())

    def call_stats(self) -> dict[str, CallStats]:
        """The server time of functions: "fcall" for those that write, "fcall_ro" for those that read.

        Covers all functions of all runs: the server does not distinguish them. Not available on a cluster.
        """
        return self._driver.run(self._operations.call_stats())

    def wait(self, signal: int, timeout_s: float, *, batch: bool = False) -> int:
        """Sleep until something changes after ``signal``, or for ``timeout_s``; returns the newest signal.

        A change is room for work or new weights; with ``batch``, a READY buffer; in both cases the end of
        the run. The two kinds of signal are numbered separately. Not counted in ``stats``.
        """
        return self._driver.sleep(self._operations.wait(signal, timeout_s, batch))

    # -- workers ------------------------------------------------------------------------------------

    def reserve(self, worker: str, version: int, limit: int) -> Grant:
        """Ask for up to ``limit`` trajectories to generate.

        Args:
            worker: unique for each process start; its lease is extended.
            version: the weights version that the engine has loaded.
            limit: the engine's free capacity, in trajectories.
        """
        return self._driver.run(self._operations.reserve(worker, version, limit))

    def complete(self, reservation: Reservation, payload: Trajectory) -> Completion:
        """Hand in a finished trajectory.

        Raises:
            Fenced: the claim was superseded; drop the work.
            Invalid: a segment is older than the claim or newer than the published version; or the run cannot
                train it: a token id outside the model's vocabulary, too many tokens, a reward beyond 1e9.
        """
        return self._driver.run(self._operations.complete(reservation, payload))

    def complete_many(self, finished: Sequence[tuple[Reservation, Trajectory]]) -> list[Completion | Refused]:
        """Hand in several finished trajectories with few round trips.

        Each is a separate transition. The answers come in order; an error (``Fenced``, ``Invalid``) is
        returned in place of an answer, not raised.
        """
        return self._driver.run(self._operations.complete_many(finished))

    def group_trajectories(self, group: int) -> list[Trajectory]:
        """The complete trajectories of a group, in member order, for post-processing.

        Raises:
            Fenced: the group has left the run.
        """
        return self._driver.run(self._operations.group_trajectories(group))

    def judge(
        self,
        reservation: Reservation,
        *,
        keep: bool = True,
        reason: str = "",
        advantages: Sequence[float] | None = None,
    ) -> Completion:
        """Hand in the result of a group's post-processing; the group is placed or filtered.

        Args:
            reservation: the claim on it (member 0), from ``complete`` or ``reserve``.
            keep: False filters the group.
            reason: why it is filtered, human-readable.
            advantages: one for each complete member, in order; None leaves them to the trainer.

        Raises:
            Fenced: the claim was superseded.
            Invalid: the advantages are not one finite number for each member.
        """
        return self._driver.run(self._operations.judge(reservation, keep, reason, advantages))

    def release(
        self, reservation: Reservation, prefix: Response | None = None, reason: str = "detach"
    ) -> Release:
        """Give a claim back unfinished; this does not count as a failed attempt.

        Args:
            reservation: the claim.
            prefix: the tokens so far, for another worker to continue.
            reason: why, human-readable.

        Raises:
            Fenced: the claim was superseded.
        """
        return self._driver.run(self._operations.release(reservation, prefix, reason))

    def fail(self, reservation: Reservation, error: str) -> Release:
        """End a claim whose attempt failed. The next attempt starts clean.

        After ``max_attempts`` failures of one member, the prompt becomes a dead letter.

        Args:
            reservation: the claim.
            error: what went wrong, human-readable.

        Raises:
            Fenced: the claim was superseded.
        """
        return self._driver.run(self._operations.fail(reservation, error))

    def save_prefix(self, reservation: Reservation, prefix: Response) -> None:
        """Save the tokens so far and keep the claim.

        Raises:
            Fenced: the claim was superseded; stop generating.
        """
        self._driver.run(self._operations.save_prefix(reservation, prefix))

    def renew(
        self, worker: str, version: int | None = None, info: Mapping[str, object] | None = None
    ) -> Renewal:
        """Send a worker's heartbeat: extend the lease of everything it holds; attach it if needed.

        Args:
            worker: its name.
            version: the weights version it has loaded.
            info: figures about itself, shown in the status.
        """
        acknowledged = self._acknowledged.get(worker, 0)
        renewal = self._driver.run(self._operations.renew(worker, version, info, acknowledged))
        self._acknowledged[worker] = renewal.acknowledge
        return renewal

    def pin(self, worker: str, version: int | None = None) -> WeightsRef:
        """Protect a version's files (default: the newest) while this worker loads and uses them.

        The pin ends when ``renew`` reports a newer loaded version, or when the worker is gone.

        Raises:
            UnknownWeights: the version is not registered, or was retired.
        """
        return self._driver.run(self._operations.pin(worker, version))

    def leave(self, worker: str) -> None:
        """Leave the run; claims that the worker still holds are issued to others."""
        self._driver.run(self._operations.leave(worker))

    # -- the trainer --------------------------------------------------------------------------------

    def take(self, trainer: str, version: int | None = None) -> Batch | None:
        """The batch for the next update, or None while it is not READY.

        Args:
            trainer: unique for each process start; a new one takes over and fences the old.
            version: the version of the trainer's weights (default: the published one). If it is older, the
                batch that was trained from it is returned again.

        Raises:
            RunEnded: all steps are trained, or the prompts cannot fill another batch.
            Fenced: another trainer has taken over.
            StateLost: the trainer is ahead of the server, or behind the batches that the server keeps.
        """
        return self._driver.run(self._operations.take(trainer, version))

    def trajectories(self, groups: Sequence[BatchGroup]) -> list[list[Trajectory]]:
        """The trajectories of some groups of a batch, by group and member.

        Raises:
            StateLost: they are no longer on the server.
        """
        return self._driver.run(self._operations.trajectories(groups))

    def encoded_trajectories(self, groups: Sequence[BatchGroup]) -> list[bytes]:
        """Like :meth:`trajectories`, but one flat list of encoded ones, for :meth:`roq.Trajectory.decode`."""
        return self._driver.run(self._operations.encoded_trajectories(groups))

    def publish(
        self, version: int, weights: str, trainer: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Publish weights whose files are complete. Idempotent.

        Args:
            version: the taken batch's version plus 1.
            weights: the location of the files.
            trainer: its name.
            metrics: the step's metrics, stored with its event.

        Raises:
            NotReady: the batch of this update was not taken.
            Fenced: another trainer has taken over.
        """
        self._driver.run(self._operations.publish(version, weights, trainer, metrics))

    def announce_sender(self, address: str, trainer: str) -> None:
        """Announce the address that the trainer sends weights from; ``pin`` returns it. "" withdraws it.

        Valid until another trainer takes over.

        Raises:
            NotReady: no batch was taken yet.
            Fenced: another trainer has taken over.
        """
        self._driver.run(self._operations.announce_sender(address, trainer))

    def checkpointed(self, version: int, trainer: str) -> None:
        """Announce a durable checkpoint; earlier batches are freed.

        Raises:
            NotReady: the version is not published.
            Fenced: another trainer has taken over.
        """
        self._driver.run(self._operations.checkpointed(version, trainer))

    def weights(self) -> list[WeightsRef]:
        """The registered weights, oldest first."""
        return self._driver.run(self._operations.weights())

    def retire_weights(self, trainer: str, keep: int) -> list[WeightsRef]:
        """Unregister unneeded weights, except the ``keep`` newest; the caller then deletes their files.

        Raises:
            NotReady: no trainer has taken a batch yet.
            Fenced: another trainer has taken over.
        """
        return self._driver.run(self._operations.retire_weights(trainer, keep))
