"""Text for a run's state, shared by ``status``, ``buffers``, ``watch``, ``up`` and the exporter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from roq.config import RunConfig
from roq.events.event import Event
from roq.observe.metrics_log import Step
from roq.text import clock, one_line
from roq.types import BufferStatus, Ledger, SlotStatus, Status, WorkerStatus

__all__ = [
    "LEGEND",
    "SLOT_COLUMNS",
    "event_text",
    "failures_text",
    "heartbeat",
    "heartbeat_age",
    "ledger_text",
    "published_text",
    "remaining",
    "run_state",
    "shortfall",
    "slot_cells",
    "slot_row",
    "slot_signs",
    "step_line",
    "step_of",
    "tokens_per_s",
    "total_steps",
    "trainer_text",
    "worker_doing",
    "worker_error",
    "worker_figure",
    "worker_info",
    "worker_version",
]

LONGEST_ERROR = 300  # characters of the latest failure in a line
MOST_FIGURE = 2**63  # larger numbers measure nothing, and their sums may overflow
OCCUPIED, RESERVED, EMPTY = "■", "▨", "·"
LEGEND = f"{OCCUPIED} Occupied  {RESERVED} Reserved  {EMPTY} Empty"
STEP_FORMS = (
    "reward {reward/mean:.3f}",
    "staleness {staleness/mean:.2f} (max {staleness/max:.0f})",
    "mismatch KL {mismatch_kl:.1e}",
    "{tokens/response:,.0f} tokens",
    "{time/step:.1f} s",
    "waited {time/wait_for_batch:.1f} s",
)


# ---- the run and its trainer ---------------------------------------------------------------------


def run_state(status: Status) -> str:
    """Return ``ended``, ``paused`` or ``running``."""
    return "ended" if status.ended else "paused" if status.paused else "running"


def total_steps(config: RunConfig) -> int | None:
    """Return the run's number of steps; None if unlimited."""
    if config.prompts is None or config.epochs is None:
        return config.total_steps
    supply = config.prompts * config.epochs // config.batch_size
    return supply if config.total_steps is None else min(supply, config.total_steps)


def step_of(version: int, config: RunConfig) -> str:
    """Return ``step 3 of 30``, or ``step 3`` if the run is unlimited."""
    total = total_steps(config)
    return f"step {version}" + (f" of {total}" if total else "")


def ledger_text(ledger: Ledger) -> str:
    """``12 issued = 8 trained + 4 dead``: the whereabouts of every prompt, those of none left out."""
    parts = [
        f"{count} {name.replace('_', ' ')}"
        for name, count in msgspec.structs.asdict(ledger).items()
        if name != "issued" and (count or name == "trained")
    ]
    return f"{ledger.issued} issued = {' + '.join(parts)}" + ("" if ledger.balanced else " (WRONG SUM)")


def failures_text(status: Status) -> str:
    """``12 attempts failed, latest: TypeError: …``; empty when none did."""
    if not status.failed:
        return ""
    times = "1 attempt" if status.failed == 1 else f"{status.failed} attempts"
    return f"{times} failed, latest: {one_line(status.last_failure)[:LONGEST_ERROR]}"


def shortfall(status: Status, config: RunConfig) -> str | None:
    """Why a run stopped before its goal, the counts, and how to continue; None while nothing is wrong.

    The goal is ``total_steps``, or at least one step.
    """
    goal = f" of {config.total_steps}" if config.total_steps else ""
    at = f"after {status.version}{goal} steps"
    counts = f"prompts: {ledger_text(status.ledger)}"
    failures = failures_text(status)
    if status.failing and not status.ended:
        return (
            f"the run was paused {at}: the first {failures}; {counts}. Fix the cause, then start `roq up` "
            "again, or without it `roq resume`"
        )
    if not status.ended or status.version >= (config.total_steps or 1):
        return None
    ways = ["raise protocol.epochs"]
    if status.ledger.dead:
        ways.insert(0, "fix the cause and put dead letters back (`roq dead --revive-all`)")
    return (
        f"the run ended {at}: the prompts cannot fill another batch of {config.batch_size}; {counts}"
        f"{'; ' if failures else ''}{failures}. To continue: {', or '.join(ways)}; then start it again"
    )


def trainer_text(status: Status) -> str:
    """Describe what the trainer is doing, or which slots it is waiting for and who holds them."""
    if status.ended:
        short = status.end_reason == "prompts_exhausted"
        return "the run has ended: the prompts are used up" if short else "the run has ended"
    if status.training is not None:
        return f"training batch {status.training}"
    first = next((buffer for buffer in status.buffers if buffer.buffer == status.frontier), None)
    if first is None:
        return f"waiting for batch {status.frontier}: nothing is reserved for it yet"
    if first.state == "READY":
        return f"batch {first.buffer} is READY" + ("" if status.trainer else "; no trainer has joined yet")
    text = f"waiting for batch {first.buffer}: "
    text += f"{first.occupied} complete, {first.reserved} in progress, {first.empty} empty"
    if status.waiting:
        oldest = max(status.waiting, key=lambda slot: slot.age_s)
        whose = f"with {', '.join(oldest.owners)}" if oldest.owners else "with no worker"
        text += f"; oldest: slot {oldest.slot}, {whose} for {clock(oldest.age_s)}"
    return text


# ---- slots ---------------------------------------------------------------------------------------


def slot_row(buffer: BufferStatus, width: int = 64) -> str:
    """Draw the buffer's slots in order, one sign each, or scaled down if there are more than ``width``.

    >>> slot_row(BufferStatus(buffer=3, occupied=2, reserved=1, empty=1, state="PENDING"))
    '■■·▨'
    """
    occupied, empty, reserved = buffer.occupied, buffer.empty, buffer.reserved
    total = occupied + empty + reserved
    if total > width:
        occupied, reserved = _shrink(occupied, total, width), _shrink(reserved, total, width)
        empty = max(0, width - occupied - reserved)
    return OCCUPIED * occupied + EMPTY * empty + RESERVED * reserved


def _shrink(part: int, total: int, width: int) -> int:
    """Scale a part to ``width``; at least 1 if not empty, so that one open slot of 4,096 is visible."""
    return max(1, part * width // total) if part else 0


def slot_signs(buffer: BufferStatus, slots: Iterable[SlotStatus]) -> Iterator[tuple[str, SlotStatus | None]]:
    """Yield each slot of the buffer in order: its sign, and its status if filled."""
    filled = {slot.slot: slot for slot in slots if slot.buffer == buffer.buffer}
    for number in range(1, buffer.occupied + buffer.reserved + buffer.empty + 1):
        slot = filled.get(number)
        yield (EMPTY if slot is None else RESERVED if slot.state == "reserved" else OCCUPIED), slot


SLOT_COLUMNS = ("slot", "group", "prompt", "v_traj", "age", "done", "running", "to issue", "held by")


def slot_cells(slot: SlotStatus) -> tuple[str, ...]:
    """Return a filled slot as a row of :data:`SLOT_COLUMNS`."""
    about = (f"{slot.buffer}.{slot.slot}", slot.group, slot.ordinal, slot.v_traj, clock(slot.age_s))
    return (*map(str, (*about, slot.done, slot.running, slot.pending)), ", ".join(slot.workers))


# ---- workers -------------------------------------------------------------------------------------


def worker_info(worker: WorkerStatus) -> dict[str, object]:
    """Return the worker's report on itself."""
    try:
        info = msgspec.json.decode(worker.info, type=dict[str, object]) if worker.info else {}
    except (msgspec.DecodeError, RecursionError):
        return {"text": worker.info}
    return {k: v for k, v in info.items() if not isinstance(v, int | float) or abs(v) < MOST_FIGURE}


def worker_figure(worker: WorkerStatus, name: str) -> str:
    """Return one entry of the worker's report; "-" if missing, as with a custom client."""
    return str(worker_info(worker).get(name, "-"))


def worker_version(worker: WorkerStatus) -> str:
    """Return the weights version it has loaded; "-" if not reported yet."""
    return "-" if worker.version is None else str(worker.version)


def worker_doing(worker: WorkerStatus) -> str:
    """Return the worker's activity, in a few words."""
    return "draining" if worker.draining else str(worker_info(worker).get("doing", ""))


def worker_error(worker: WorkerStatus) -> str:
    """Return the worker's last error in one line, with its age; empty if there was none."""
    if not worker.error:
        return ""
    return f"{worker.error.splitlines()[0][:80]} ({clock(worker.error_age_s or 0.0)} ago)"


def heartbeat_age(worker: WorkerStatus, config: RunConfig) -> float:
    """Return the seconds since the worker's last call; every call renews its lease."""
    return max(0.0, config.lease_s - worker.lease_left_s)


def heartbeat(worker: WorkerStatus, config: RunConfig) -> str:
    """Return ``3.2 s ago``, or ``expired``."""
    return f"{clock(heartbeat_age(worker, config))} ago" if worker.lease_left_s > 0 else "expired"


def tokens_per_s(workers: Iterable[WorkerStatus]) -> float:
    """Return the sum of the speeds that live workers report."""
    live = [worker_info(worker).get("tokens_per_s") for worker in workers if worker.lease_left_s > 0]
    return float(sum(speed for speed in live if isinstance(speed, int | float)))


# ---- events and steps ----------------------------------------------------------------------------


def event_text(event: Event) -> str:
    """Return an event as one human-readable line, without its time.

    >>> event_text(Event("5-0", {"event": "occupy", "group": "3", "at": "0.2", "moves": "7:0.3>1.1"}))
    'occupy          group 3, at 0.2, moves 7:0.3>1.1'
    """
    if event.name == "gap":
        missing = event.get("missing", "an unknown number of")
        return f"gap             {missing} events were trimmed from the stream before they were read"
    fields = ", ".join(f"{name} {value}" for name, value in event.fields.items() if name != "event")
    return f"{event.name:<15} {fields}".rstrip()


def _step_parts(metrics: Mapping[str, object]) -> Iterator[str]:
    """Yield a step's main metrics as text, skipping missing ones."""
    known = {name: value for name, value in metrics.items() if value is not None}
    for form in STEP_FORMS:
        try:
            yield form.format_map(known)
        except KeyError:
            continue


def published_text(publish: Event) -> str:
    """Return the metrics that the trainer published with a version, in one line."""
    return ", ".join((f"v{publish.number('version')} published", *_step_parts(publish.metrics)))


def step_line(step: Step, total: int | None, left_s: float | None) -> str:
    """Return a step of ``metrics.jsonl`` as one line."""
    parts = [f"step {step.step}" + (f"/{total}" if total else ""), *_step_parts(msgspec.to_builtins(step))]
    if step.replay:
        parts.append("repeated after a restart")
    if left_s:
        parts.append(f"{clock(left_s)} left")
    return "  ".join(parts)


def remaining(steps: Sequence[Step], total: int | None) -> float | None:
    """Estimate the seconds left from the last ten steps; None if unknown."""
    recent = steps[-11:]
    if total is None or len(recent) < 2 or recent[-1].step <= recent[0].step:
        return None
    pace = (recent[-1].time - recent[0].time) / (recent[-1].step - recent[0].step)
    return max(0.0, pace * (total - recent[-1].step))
