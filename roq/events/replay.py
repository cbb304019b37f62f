"""Replay: the only Python code that interprets events.

Subclasses override the ``on_…`` methods: :mod:`roq.events.audit`, :mod:`roq.observe.timeline`,
:mod:`roq.observe.prometheus.counters` and :mod:`roq.sim.events`. The board has its own, ``static/state.js``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from roq.config import RunConfig
from roq.events.archive import archived_config
from roq.events.event import Event, Place, parse_place
from roq.events.history import Batch, Fate, GroupHistory, MemberHistory

__all__ = ["Reopened", "Replay"]

Reopened = Literal["lease_expired", "error", "detach", "left"]
"""Why a claim ended: its lease expired, the attempt failed, it was released, or its worker left."""


class Replay:
    """The state of a run after the events applied so far.

    It ignores groups created before its first event and events it does not know. Contradictions are passed to
    :meth:`doubt`.

    Attributes:
        run, config: from an archive's first line; "" and None without one.
        events: number applied. began, time: times of the first and the newest (s since 1970).
        whole: the events start with the run's creation and none is missing.
        missing: number of events missing in gaps; None if unknown.
        groups: all groups seen, by number, unless :meth:`forget` is called.
        slots: the group in each filled slot.
        prompts: the state of each issued ordinal: "in_slots", "trained", or its fate.
        next_ordinal: number of ordinals issued.
        ahead: the most versions that a group was reserved ahead: the maximum staleness in use.
        version: the newest published weights. batch: the batch in training, or None.
        frontier: the next buffer to be taken.
        free_since: when the trainer became free to take a batch; None if unknown.
        workers: the number of claims of each attached worker.
        trainer: the trainer's name. paused, ended: the current state.
        reissued, expired, released: claims issued again, lost with an expired lease, and given back.
    """

    def __init__(self) -> None:
        self.run = ""
        self.config: RunConfig | None = None
        self.events = 0
        self.began = self.time = 0.0
        self.whole = True
        self.missing: int | None = 0
        self.groups: dict[int, GroupHistory] = {}
        self.slots: dict[Place, int] = {}
        self.prompts: dict[int, str] = {}
        self.next_ordinal = 0
        self.ahead = 0
        self.version: int = 0
        self.batch: Batch | None = None
        self.frontier = 0
        self.free_since: float | None = None
        self.workers: dict[str, int] = {}
        self.trainer = ""
        self.paused = False
        self.ended = False
        self.reissued = self.expired = self.released = 0

    @property
    def training(self) -> int | None:
        """The number of the batch in training."""
        return None if self.batch is None else self.batch.version

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        name = event.name
        if name == "archive":
            self.run, self.config = event.get("run"), archived_config([event])
            return
        time = event.time
        if not self.events:
            self.began = time
            if name != "created":
                self.whole = False
                self.doubt("the events do not start with the run's creation: older ones were trimmed")
        self.events += 1
        self.time = max(self.time, time)
        if name not in self.HANDLERS:
            self.on_other(event)
        elif (handler := self.HANDLERS[name]) is not None:
            handler(self, event)

    def forget(self, groups: Iterable[GroupHistory]) -> None:
        """Drop groups and their prompts, to bound the memory of a long-running reader."""
        for group in groups:
            self.groups.pop(group.group, None)
            self.prompts.pop(group.ordinal, None)
            if group.place is not None and self.slots.get(group.place) == group.group:
                del self.slots[group.place]

    # -- callbacks to override, each called after the state changed ---------------------------------

    def doubt(self, sentence: str) -> None:
        """The event contradicts earlier ones."""

    def on_other(self, event: Event) -> None:
        """The event is not one of this version, or could not be read."""

    def on_gap(self, missing: int | None) -> None:
        """Events are missing here; None if their number is unknown."""

    def on_worker_joined(self, worker: str) -> None:
        """A worker is attached, without claims."""

    def on_worker_left(self, worker: str) -> None:
        """A worker left, or was lost."""

    def on_busy(self, worker: str) -> None:
        """A worker without claims received one."""

    def on_idle(self, worker: str) -> None:
        """A worker's last claim ended."""

    def on_reserved(self, group: GroupHistory, worker: str) -> None:
        """A new prompt took a slot."""

    def on_completed(self, group: GroupHistory | None, number: int, member: MemberHistory) -> None:
        """A trajectory was completed; ``group`` is None if unknown."""

    def on_reopened(self, why: Reopened) -> None:
        """A claim was released or lost; its member waits to be issued again."""

    def on_occupied(self, group: GroupHistory) -> None:
        """A finished group was placed in its slot."""

    def on_removed(self, group: GroupHistory | None, fate: Fate, reason: str) -> None:
        """A group left untrained; None if unknown."""

    def on_taken(self, batch: Batch) -> None:
        """The trainer took a batch."""

    def on_returned(self, batch: Batch) -> None:
        """The batch in training returned to its slots; it will be taken again without one of its groups."""

    def on_published(self, batch: Batch | None) -> None:
        """New weights were published; ``batch`` is the batch they were trained on, None if unknown."""

    def on_paused(self, paused: bool) -> None:
        """Admission was paused or resumed."""

    # -- slots --------------------------------------------------------------------------------------

    def _vacate(self, number: int) -> GroupHistory | None:
        """Take a group out of its slot."""
        group = self.groups.get(number)
        if group is None or group.place is None:
            self.doubt(f"group {number} is not in the run")
        else:
            if self.slots.get(group.place) == number:  # unless another group was placed there
                del self.slots[group.place]
            group.place = None
        return group

    def _fill(self, group: GroupHistory, place: Place) -> None:
        if place in self.slots:
            self.doubt(f"group {group.group} was placed in slot {place}, which holds {self.slots[place]}")
        self.slots[place], group.place = group.group, place

    def _move(self, event: Event) -> None:
        if "moves" not in event.fields:
            return
        for move in event.moves:
            known = self.groups.get(move.group)
            if known is not None and known.place not in (None, move.source):
                self.doubt(f"group {move.group} moved from {move.source}, but it was at {known.place}")
            if (group := self._vacate(move.group)) is not None:
                self._fill(group, move.target)

    # -- claims -------------------------------------------------------------------------------------

    def _join(self, worker: str) -> None:
        if worker not in self.workers:
            self.workers[worker] = 0
            self.on_worker_joined(worker)

    def _claim(self, group: GroupHistory, number: int, worker: str) -> None:
        self._join(worker)  # it may have joined before the first event
        member = group.members.get(number)
        if member is None:
            member = group.members[number] = MemberHistory()
        member.worker, member.issued = worker, self.time
        member.attempts += 1
        self.workers[worker] += 1
        if self.workers[worker] == 1:
            self.on_busy(worker)

    def _unclaim(self, member: MemberHistory) -> None:
        """End the claim on a member; call before changing the member."""
        if member.running and self.workers.get(member.worker):
            self.workers[member.worker] -= 1
            if not self.workers[member.worker]:
                self.on_idle(member.worker)

    def _cancel(self, group: GroupHistory, numbers: Iterable[int]) -> None:
        for number in numbers:
            member = group.members.get(number)
            if member is not None:
                self._unclaim(member)
                member.cancelled = member.completed is None

    def _cancel_all(self, group: GroupHistory) -> None:
        """End all claims on the group."""
        self._cancel(group, group.members)
        group.members.pop(0, None)  # post-processing is over

    # -- events: the run ----------------------------------------------------------------------------

    def _gap(self, event: Event) -> None:
        missing = event.number("missing") if "missing" in event.fields else None
        self.whole = False
        self.missing = None if missing is None or self.missing is None else self.missing + missing
        count = "some" if missing is None else missing
        self.doubt(f"{count} events were trimmed from the stream before here")
        self.on_gap(missing)

    def _worker_joined(self, event: Event) -> None:
        self._join(event.get("worker"))

    def _worker_left(self, event: Event) -> None:
        self.workers.pop(event.get("worker"), None)
        self.on_worker_left(event.get("worker"))

    def _trainer_joined(self, event: Event) -> None:
        self.trainer = event.get("trainer")
        if self.batch is None:
            self.free_since = self.time

    def _admission(self, _event: Event, paused: bool) -> None:
        self.paused = paused
        self.on_paused(paused)

    def _ended(self, _event: Event, ended: bool) -> None:
        self.ended = ended

    # -- events: a group ----------------------------------------------------------------------------

    def _reserve(self, event: Event) -> None:
        number, ordinal = event.number("group"), event.number("ordinal")
        if ordinal == self.next_ordinal:
            self.next_ordinal += 1
        elif (where := self.prompts.get(ordinal)) != "requeued":
            self.doubt(f"ordinal {ordinal} was issued again while it was {where}")
        if number in self.groups:
            self.doubt(f"group {number} was created twice")
        self.prompts[ordinal] = "in_slots"
        group = GroupHistory(number, ordinal, event.number("v_traj"), reserved=self.time)
        self.groups[number] = group
        place = parse_place(event.get("at"))
        self._fill(group, place)
        self.ahead = max(self.ahead, place.buffer - group.v_traj)
        self._issued(group, event)
        self.on_reserved(group, event.get("worker"))

    def _issue(self, event: Event, again: bool = False) -> None:
        group = self.groups.get(event.number("group"))
        if group is None or group.place != parse_place(event.get("at")):
            self.doubt(f"group {event.get('group')} was issued at {event.get('at')}, but is not there")
        if again:
            self.reissued += event.get("members").count(",") + 1
        if group is not None:
            group.v_traj = event.number("v_traj", group.v_traj)
            self._issued(group, event)

    def _issued(self, group: GroupHistory, event: Event) -> None:
        for number in event.get("members").split(","):
            self._claim(group, int(number), event.get("worker"))

    def _complete(self, event: Event) -> None:
        number, group = event.number("member"), self.groups.get(event.number("group"))
        member = None if group is None else group.members.get(number)
        if member is None:
            member = MemberHistory()
        self._unclaim(member)
        member.worker, member.completed = event.get("worker"), self.time
        member.tokens, member.reward = event.number("tokens"), float(event.get("reward", "0"))
        if group is not None:
            group.members[number], group.finished = member, self.time
        self.on_completed(group, number, member)

    def _reopen(self, event: Event, expired: bool = False) -> None:
        why: Reopened = "lease_expired"
        if expired:
            self.expired += 1
        else:
            self.released += 1
            why = "error" if event.number("failed") else "detach" if event.get("reason") else "left"
        group = self.groups.get(event.number("group"))
        member = None if group is None else group.members.get(event.number("member"))
        if member is not None:
            self._unclaim(member)
            member.worker, member.issued = "", None
        self.on_reopened(why)

    def _cancelled(self, event: Event) -> None:
        if (group := self.groups.get(event.number("group"))) is not None:
            self._cancel(group, map(int, event.get("members").split(",")))

    def _judging(self, event: Event) -> None:
        if (group := self.groups.get(event.number("group"))) is not None:
            self._cancel_all(group)
            group.state = "judging"
            self._claim(group, 0, event.get("worker"))

    def _occupy(self, event: Event) -> None:
        group = self._vacate(event.number("group"))
        self._move(event)
        if group is None:
            return
        if group.occupied is not None:
            self.doubt(f"group {group.group} was finished twice")
        group.state, group.occupied = "occupied", self.time
        group.v_traj = event.number("v_traj", group.v_traj)
        self._cancel_all(group)
        self._fill(group, parse_place(event.get("at")))
        self.on_occupied(group)

    def _remove(self, event: Event, fate: Fate) -> None:
        group = self._vacate(event.number("group"))
        self._move(event)
        if group is not None:
            self._cancel_all(group)
            group.state, group.left, group.reason = fate, self.time, event.get("reason")
            self.prompts[group.ordinal] = fate
        self.on_removed(group, fate, event.get("reason"))

    def _revived(self, event: Event) -> None:
        ordinal = event.number("ordinal")
        if (where := self.prompts.get(ordinal)) != "dead":
            self.doubt(f"ordinal {ordinal} was revived while it was {where}")
        self.prompts[ordinal] = "requeued"

    # -- events: the trainer ------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        self._move(event)
        version, numbers = event.number("version"), [int(n) for n in event.get("groups").split()]
        if version < self.frontier:
            self.doubt(f"batch {version} was taken twice")
        elif version > self.frontier:
            self.doubt(f"batch {version} was taken before batch {self.frontier}")
        self.frontier = version + 1
        known: list[GroupHistory] = []
        for slot, number in enumerate(numbers, start=1):
            group = self.groups.get(number)
            if group is None or group.place != (version, slot) or group.state != "occupied":
                self.doubt(f"group {number} of batch {version} is not a finished group in slot {slot}")
            if group is not None:
                if group.place is not None:
                    self._vacate(number)
                group.state, group.taken, group.batch = "training", self.time, version
                known.append(group)
        self.batch = Batch(version, self.free_since, self.time, known)
        self.on_taken(self.batch)

    def _returned(self, event: Event) -> None:
        version, batch = event.number("version"), self.batch
        if batch is None or batch.version != version:
            self.doubt(f"batch {version} returned to its slots, but it was not in training")
        for slot, number in enumerate(map(int, event.get("groups").split()), start=1):
            if (group := self.groups.get(number)) is not None:
                group.state, group.taken, group.batch = "occupied", None, None
                self._fill(group, Place(version, slot))
        self.batch, self.frontier, self.free_since = None, version, self.time
        if batch is not None:
            self.on_returned(batch)

    def _publish(self, event: Event) -> None:
        version, batch = event.number("version"), self.batch
        if version != self.version + 1:
            self.doubt(f"version {version} was published after {self.version}")
        if batch is None or batch.version != version - 1:
            self.doubt(f"version {version} was published, but batch {version - 1} was not in training")
            batch = None
        self.version, self.batch, self.free_since = version, None, self.time
        self.frontier = max(self.frontier, version)
        if batch is not None:
            batch.published, batch.metrics = self.time, event.metrics
            for group in batch.groups:
                if (where := self.prompts.get(group.ordinal)) != "in_slots":
                    self.doubt(f"ordinal {group.ordinal} was trained while it was {where}")
                self.prompts[group.ordinal] = "trained"
                group.state, group.left = "trained", self.time
        self.on_published(batch)

    HANDLERS: ClassVar[Mapping[str, Callable[[Any, Event], None] | None]] = {
        "created": None,
        "gap": _gap,
        "worker_joined": _worker_joined,
        "worker_left": _worker_left,
        "worker_lost": _worker_left,
        "draining": None,
        "trainer_joined": _trainer_joined,
        "paused": partial(_admission, paused=True),
        "resumed": partial(_admission, paused=False),
        "ended": partial(_ended, ended=True),
        "reopened": partial(_ended, ended=False),
        "reserve": _reserve,
        "issue": _issue,
        "reissue": partial(_issue, again=True),
        "complete": _complete,
        "release": _reopen,
        "expired": partial(_reopen, expired=True),
        "cancelled": _cancelled,
        "judging": _judging,
        "occupy": _occupy,
        "requeued": partial(_remove, fate="requeued"),
        "discarded": partial(_remove, fate="discarded"),
        "filtered": partial(_remove, fate="filtered"),
        "dead": partial(_remove, fate="dead"),
        "revived": _revived,
        "take": _take,
        "returned": _returned,
        "publish": _publish,
        "checkpointed": None,
        "configured": None,
    }
    """Handlers by event; None for no effect. A test compares the names with those the library declares."""
