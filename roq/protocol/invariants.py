"""The invariants of a run, checked on one consistent snapshot of its keys (``roq_verify``).

The numbers are those in docs/protocol.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from roq.protocol.snapshot import AGES, SPAN, Snapshot

__all__ = ["broken_invariants", "problems"]


def broken_invariants(reply: Sequence[Any]) -> list[str]:
    """One sentence for each broken invariant; empty when all hold."""
    return problems(Snapshot(reply))


def problems(run: Snapshot) -> list[str]:
    """As :func:`broken_invariants`, for a parsed snapshot."""
    if not run.config:
        return ["there is no such run on this server"]
    checks = (_slots, _layout, _versions, _batches, _ledger, _claims, _leftovers)
    return [f"{check.__name__[1:]}: {problem}" for check in checks for problem in check(run)]


def _slots(run: Snapshot) -> Iterator[str]:
    """1 and 2: a live group is in exactly one slot of a legal buffer; a filled slot has one live group."""
    eta, frontier = int(run.config["eta"]), run.number("frontier")
    from_slots = run.slots
    from_index = {
        place: (kind, group) for kind, places in run.index.items() for group, place in places.items()
    }
    if from_slots != from_index:
        differing = sorted(
            place
            for place in from_slots.keys() | from_index.keys()
            if from_slots.get(place) != from_index.get(place)
        )
        yield f"slots and their indexes differ at {differing}"
    counts = Counter(group for _, group in from_slots.values())
    for group, count in counts.items():
        if count > 1:
            yield f"group {group} is in {count} slots"
        if group not in run.groups:
            yield f"a slot names group {group}, which has no record"
    in_batches = {group for groups in run.batches.values() for group in groups}
    for group in run.groups.keys() - counts.keys() - in_batches:
        yield f"group {group} is in no slot and no batch"
    for (buffer, slot), (kind, group) in from_slots.items():
        if group not in run.groups:
            continue
        v_traj = run.groups[group]["v"]
        if not frontier <= buffer <= v_traj + eta:
            yield f"group {group} (v_traj {v_traj}) is in buffer {buffer}, not in {frontier}..{v_traj + eta}"
        if kind == "reserved":
            expected = (v_traj * AGES + buffer - v_traj) * SPAN + slot
            if run.by_version.get(group) != expected:
                yield f"the version index of group {group} is {run.by_version.get(group)}, not {expected}"
    for group in run.by_version.keys() - run.index["reserved"].keys():
        yield f"the version index still holds group {group}"


def _layout(run: Snapshot) -> Iterator[str]:
    """3: Occupied, then Empty, then Reserved; no Occupied group is later than an Empty slot that needs it."""
    size, need = int(run.config["buffer_slots"]), int(run.config["batch_size"])
    window = range(run.number("frontier"), run.number("version") + int(run.config["eta"]) + 1)
    hungry: int | None = None
    for buffer in window:
        line = [run.slots.get((buffer, slot), ("empty", 0))[0] for slot in range(1, size + 1)]
        occupied, reserved = line.count("occupied"), line.count("reserved")
        empty = size - occupied - reserved
        if line != ["occupied"] * occupied + ["empty"] * empty + ["reserved"] * reserved:
            yield f"buffer {buffer} is laid out as {' '.join(line)}"
        if occupied > need:
            yield f"buffer {buffer} has {occupied} Occupied, more than a batch"
        if hungry is not None and occupied:
            yield f"buffer {hungry} has an Empty slot while buffer {buffer} has Occupied groups"
        if hungry is None and empty and occupied < need:
            hungry = buffer
    for buffer, slot in run.slots:
        if buffer not in window or not 1 <= slot <= size:
            yield f"slot {buffer}.{slot} is outside the window"


def _versions(run: Snapshot) -> Iterator[str]:
    """4: n is v or v + 1."""
    version, frontier = run.number("version"), run.number("frontier")
    if frontier not in (version, version + 1):
        yield f"the frontier is {frontier} at version {version}"
    if version and str(version) not in run.weights:
        yield f"the published version {version} has no location"


def _batches(run: Snapshot) -> Iterator[str]:
    """5: a taken batch has B groups of G complete members, payloads present, staleness at most eta."""
    eta = int(run.config["eta"])
    for batch, groups in run.batches.items():
        if batch >= run.number("checkpoint") and len(groups) != int(run.config["batch_size"]):
            yield f"batch {batch} has {len(groups)} groups"
        for group in groups:
            record = run.groups.get(group)
            if record is None:
                yield f"group {group} of batch {batch} has no record"
                continue
            if batch - record["v"] > eta:
                yield f"group {group} of batch {batch} has staleness {batch - record['v']}"
            yield from _complete(run, record)
    for group in run.index["occupied"]:
        if group in run.groups:
            yield from _complete(run, run.groups[group])
    for batch in range(run.number("checkpoint"), run.number("frontier")):
        if batch not in run.batches:
            yield f"batch {batch} is neither covered by a checkpoint nor kept"


def _complete(run: Snapshot, record: Any) -> Iterator[str]:
    complete = [m for m, member in enumerate(record["members"], 1) if member["state"] == "complete"]
    if len(complete) != int(run.config["group_size"]):
        yield f"group {record['group']} counts as finished with {len(complete)} complete members"
    oldest = min((record["members"][m - 1]["v"] for m in complete), default=None)
    if oldest != record["v"]:
        yield f"group {record['group']} has v_traj {record['v']} but its members start at {oldest}"


def _ledger(run: Snapshot) -> Iterator[str]:
    """6: every issued ordinal is exactly one of in a slot, requeued, trained, filtered, discarded, dead."""
    training = [g for batch, groups in run.batches.items() if batch >= run.number("version") for g in groups]
    in_slots = [*run.index["reserved"], *run.index["occupied"], *training]
    requeued = [int(entry.split()[0]) for entry in run.requeued]
    parts = {
        "in slots": len(in_slots),
        "requeued": len(requeued),
        "trained": run.number("trained"),
        "filtered": run.number("filtered"),
        "discarded": run.number("discarded"),
        "dead": len(run.dead),
    }
    issued = run.number("next_ordinal")
    if issued != sum(parts.values()):
        yield f"{issued} prompts were issued but {parts} are accounted for"
    live = Counter([run.groups[g]["ordinal"] for g in in_slots if g in run.groups])
    live.update(requeued)
    live.update(int(ordinal) for ordinal in run.dead)
    for ordinal, count in live.items():
        if count > 1:
            yield f"ordinal {ordinal} is in {count} places"
        if ordinal >= issued:
            yield f"ordinal {ordinal} was never issued"


def _claims(run: Snapshot) -> Iterator[str]:
    """7: claims, leases and waiting members match the groups' records; tokens are distinct."""
    claims: set[tuple[str, ...]] = set()
    pending: set[str] = set()
    tokens: Counter[int] = Counter()
    for group in run.index["reserved"]:
        if group not in run.groups:
            continue
        record = run.groups[group]
        members: list[Any] = record["members"]
        parts = dict(enumerate(members, 1))
        if "judgement" in record:
            parts[0] = record["judgement"]
        elif sum(m["state"] == "complete" for m in parts.values()) >= int(run.config["group_size"]):
            yield f"group {group} is complete but neither placed nor being post-processed"
        for m, member in parts.items():
            name = f"{group}.{m}"
            if member["token"]:
                tokens[member["token"]] += 1
            if member["state"] == "leased":
                claims.add((member["worker"], name))
            elif member["state"] == "pending":
                pending.add(name)
    if claims != run.claims:
        yield f"claims and records differ: {sorted(claims ^ run.claims)}"
    if pending != run.pending:
        yield f"waiting members and records differ: {sorted(pending ^ run.pending)}"
    for token, count in tokens.items():
        if count > 1:
            yield f"token {token} was issued {count} times"
        if token >= run.number("next_token"):
            yield f"token {token} was never issued"
    for worker, name in run.claims:
        if worker not in run.heartbeats:
            yield f"{name} is claimed by {worker}, which has no lease"
    if run.heartbeats != run.workers.keys():
        yield f"leases and workers differ: {sorted(run.heartbeats ^ run.workers.keys())}"


def _leftovers(run: Snapshot) -> Iterator[str]:
    """8: no field outlives what it describes."""
    complete = {
        f"{group}.{m}"
        for group, record in run.groups.items()
        for m, member in enumerate(record["members"], 1)
        if member["state"] == "complete"
    }
    if complete != run.payloads:
        yield f"payloads and complete members differ: {sorted(complete ^ run.payloads)[:8]}"
    kept = {
        f"{group}.{m}"
        for group, record in run.groups.items()
        for m, member in enumerate(record["members"], 1)
        if member.get("prefix")
    }
    if kept != run.prefixes:
        yield f"prefixes and records differ: {sorted(kept ^ run.prefixes)[:8]}"
    bytes_known = sum(
        member.get("bytes", 0) for record in run.groups.values() for member in record["members"]
    )
    if bytes_known != run.number("payload_bytes"):
        yield f"payload_bytes is {run.number('payload_bytes')}, the records hold {bytes_known}"
    for worker in run.pins.keys() - run.heartbeats:
        yield f"{worker} pins weights without a lease"
    for entry in run.cancelled:
        if (worker := entry.split()[0]) not in run.heartbeats | run.departed:
            yield f"a cancellation for {worker} outlived the worker"
