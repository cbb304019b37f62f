"""The structs exchanged with the server-side library.

The Lua functions write replies as JSON objects, which are decoded straight into these structs; a field that
the library omits takes its default. Times are the server's, in seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from roq.trajectory import Response

__all__ = [
    "Batch",
    "BatchGroup",
    "BatchMember",
    "BufferStatus",
    "CallStats",
    "Cancelled",
    "Completion",
    "DeadLetter",
    "Grant",
    "Ledger",
    "RefusalReason",
    "Release",
    "Removal",
    "Renewal",
    "Reservation",
    "SlotStatus",
    "Status",
    "WaitingSlot",
    "WeightsRef",
    "WorkerStatus",
]

RefusalReason = Literal[
    "window_full", "inflight_cap", "paused", "exhausted", "bytes", "worker_stale", "draining"
]


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A claim on one trajectory of one group, held until its worker's lease runs out.

    ``reserve`` hands it out; ``renew`` keeps it by extending the lease of everything that a worker holds;
    ``complete``, ``release`` or ``fail`` ends it. When the lease runs out or the group leaves, the claim is
    fenced: every later call with it raises ``Fenced``, and its work is issued to another worker if it is
    still needed.

    Attributes:
        group: the group's number, unique in the run.
        member: which of the group's candidates, from 1; 0 is the group's post-processing (``judge``).
        token: the fencing token; rises with every issue of this member.
        ordinal: position of the prompt in the run's prompt order, from 0.
        v_traj: oldest weights version of any part of the group.
        buffer, slot: the group's slot now (it may move later); slots count from 1.
        attempt: how often this member was issued, this time included.
        worker: the claim's holder.
        prefix: the tokens saved by an earlier attempt, or None for a clean start.
    """

    group: int
    member: int
    token: int
    ordinal: int
    v_traj: int
    buffer: int
    slot: int
    attempt: int
    worker: str
    prefix: Response | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``reserve``.

    The caller generates a response for each reservation, then completes or releases it. When ``refused`` is
    set, ``wait(signal)`` sleeps until another ``reserve`` can succeed.

    Attributes:
        reservations: the claims handed out, possibly fewer than asked for.
        refused: None, or the reason why there are fewer than asked for.
        version: the newest published weights version.
        signal: pass it to ``wait`` to sleep until something changes after this answer.
        ended: the run is over; no more claims are handed out.
    """

    reservations: list[Reservation] = []
    refused: RefusalReason | None = None
    version: int = 0
    signal: int = 0
    ended: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``complete``.

    ``status`` is "open" (the group waits for other members), "occupied" (the group now occupies ``slot`` of
    ``buffer``), "filtered" (the group gives no gradient and has left), "surplus" (not needed; nothing was
    stored) or "judging" (the run post-processes groups, and ``judgement`` is this worker's claim on that).
    ``ready`` is the buffer that this call made READY.
    """

    status: Literal["open", "occupied", "filtered", "surplus", "judging"]
    buffer: int | None = None
    slot: int | None = None
    ready: int | None = None
    judgement: Reservation | None = None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``release`` and ``fail``: "pending" (to be issued again), or "dead" (a dead letter)."""

    status: Literal["pending", "dead"]


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``drop`` and ``filter``: the prompt's fate."""

    status: Literal["requeued", "discarded", "filtered", "dead"]


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: a prompt that failed too often, and why.

    Attributes:
        ordinal: the prompt's ordinal.
        drops: how often its groups were dropped.
        attempt: attempts at the member that was tried most often.
        reason: the last error, or why it was dropped.
        at: when, in milliseconds of the server's clock since 1970.
    """

    ordinal: int
    drops: int
    attempt: int
    reason: str
    at: int


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that its worker should stop generating."""

    group: int
    member: int
    token: int
    reason: str


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``renew``.

    Attributes:
        version: the newest published weights version.
        cancelled: claims of this worker to stop generating, those lost to an expired lease included;
            repeated until acknowledged.
        draining: this worker is being drained: it should finish its work, then leave.
        paused: admission is paused.
        ended: the run is over.
        acknowledge: internal; the client passes it with the next renewal.
    """

    version: int
    cancelled: list[Cancelled] = []
    draining: bool = False
    paused: bool = False
    ended: bool = False
    acknowledge: int = 0


class BatchMember(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a batch: its member number, reward, response length, oldest version and worker.

    ``advantage`` comes from the group's post-processing; None when the trainer computes it.
    """

    member: int
    reward: float
    tokens: int
    v_traj: int
    advantage: float | None = None
    worker: str = ""


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch; ``staleness`` is the buffer's version minus ``v_traj``."""

    group: int
    ordinal: int
    slot: int
    v_traj: int
    staleness: int
    members: list[BatchMember]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups for the update ``version → version + 1``, in slot order.

    ``take`` turns a READY buffer into a batch, and returns the same one until its update is published. Its
    data stays on the server until ``checkpointed`` names a later version: a trainer restored from an older
    checkpoint can take it again.

    ``replay`` is true when the update was already published and is trained again after a restart.
    """

    version: int
    groups: list[BatchGroup]
    replay: bool = False


class WeightsRef(msgspec.Struct, frozen=True, kw_only=True):
    """A registered weights version and the location of its files.

    ``sender`` is the address to receive it from, when the trainer sends weights (``[run] transfer``).
    """

    version: int
    location: str
    sender: str = ""


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer of the window: counts of its slots and its state."""

    buffer: int
    occupied: int
    reserved: int
    empty: int
    state: Literal["PENDING", "FULL", "READY", "TRAINING"]


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One filled slot, or one that is being trained.

    ``done``, ``running`` and ``pending`` count the group's members that are finished, leased out and waiting
    to be issued; ``workers`` hold the running ones; ``age_s`` counts from the group's reservation.
    """

    buffer: int
    slot: int
    state: Literal["reserved", "occupied", "training"]
    group: int
    ordinal: int
    v_traj: int
    age_s: float
    done: int = 0
    running: int = 0
    pending: int = 0
    workers: list[str] = []


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: the version it has loaded, its claims, and when its lease runs out.

    ``info`` holds the figures of its last heartbeat (JSON text), ``error`` its last failed attempt and
    ``error_age_s`` the age of that; ``draining`` is true for a drained worker.
    """

    worker: str
    version: int | None = None
    claims: int = 0
    lease_left_s: float = 0.0
    since_s: float = 0.0
    draining: bool = False
    info: str = ""
    error: str = ""
    error_age_s: float | None = None


class CallStats(msgspec.Struct, frozen=True, kw_only=True):
    """The server time of one command, since the server started and for all its clients.

    ``histogram`` lists (seconds, calls that took no longer), rising.
    """

    calls: int
    seconds: float
    histogram: list[tuple[float, int]] = []


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The whereabouts of every issued prompt; ``issued`` equals the sum of the others."""

    issued: int = 0
    trained: int = 0
    in_slots: int = 0
    requeued: int = 0
    filtered: int = 0
    discarded: int = 0
    dead: int = 0

    @property
    def balanced(self) -> bool:
        """True if every issued prompt is accounted for exactly once."""
        parts = self.trained + self.in_slots + self.requeued + self.filtered + self.discarded + self.dead
        return self.issued == parts


class WaitingSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A Reserved slot of the nearest buffer, which the trainer waits for: its group, age and holders."""

    buffer: int
    slot: int
    group: int
    ordinal: int
    age_s: float
    owners: list[str] = []
    pending: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot of a run.

    ``window_end`` is the last buffer that the newest weights may reserve in; ``training`` the version
    being trained, None while the trainer waits; ``inflight`` the trajectories leased out; ``pending``
    the members waiting to be issued; ``payload_bytes`` the trajectory data now in Redis.
    ``failed`` counts the failed attempts, ``last_failure`` is the newest one's error; ``failing`` is true for
    a run that was paused because nothing but failures happened. ``end_reason`` says why the run has ended:
    "prompts_exhausted" when the prompts could not fill another batch.
    """

    run: str = ""
    version: int = 0
    frontier: int = 0
    window_end: int = 0
    training: int | None = None
    checkpoint: int = 0
    trainer: str = ""
    trainer_seen_s: float | None = None
    paused: bool = False
    failing: bool = False
    failed: int = 0
    last_failure: str = ""
    ended: bool = False
    end_reason: Literal["", "total_steps", "prompts_exhausted"] = ""
    signal: int = 0
    inflight: int = 0
    pending: int = 0
    payload_bytes: int = 0
    ledger: Ledger = Ledger()
    buffers: list[BufferStatus] = []
    workers: list[WorkerStatus] = []
    waiting: list[WaitingSlot] = []
