"""An exhaustive search of the real Lua functions: from an empty run, every call that two workers, a
trainer and an operator can make, in every order, to a fixed depth; states that only differ in names are
visited once. Every call that takes an identity is made twice, and must have one effect.

    python -m tests.protocol.search --eta 1 --batch 2 --slots 2 --depth 6
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import redis

from roq import RunConfig
from roq.client.operations import config_fields
from roq.protocol.functions import FUNCTIONS
from roq.protocol.invariants import problems
from roq.protocol.keys import NAMES, keys_of
from roq.protocol.library import source
from roq.protocol.snapshot import Snapshot
from tests.conftest import Server
from tests.protocol.play import trajectory

__all__ = ["Found", "search"]

WORKERS = ("a", "b")
PAYLOAD = trajectory(tokens=1).encode()

Action = tuple[str, tuple[Any, ...]]
ONCE = {f.name for f in FUNCTIONS if f.once}


class Found(msgspec.Struct):
    """The result of a search."""

    states: int = 1
    transitions: int = 0
    refused: int = 0
    levels: list[int] = msgspec.field(default_factory=lambda: [1])
    broken: list[str] = msgspec.field(default_factory=list)


class _World:
    """Runs on one server, to copy, act on and inspect."""

    def __init__(self, client: redis.Redis, config: RunConfig) -> None:
        self.client = client
        self.config = config
        self.names = (f"x{n}" for n in itertools.count())
        self.requests = itertools.count(1)

    def create(self) -> str:
        run = next(self.names)
        self.client.execute_command(*_fcall(run, "create", json.dumps(config_fields(self.config)), ""))
        return run

    def forget(self, runs: list[str]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for run in runs:
            pipe.unlink(*keys_of(run).values())
        pipe.execute()

    def look(self, run: str) -> Snapshot:
        return Snapshot(self.client.execute_command(*_fcall(run, "verify")))

    def try_all(self, run: str, actions: list[Action]) -> Iterator[tuple[str, Snapshot, list[Any]]]:
        """For each action, a copy of the run that it was done to: its name, its state, the answers. A call
        that takes an identity is made twice under the same one."""
        if actions:
            pipe = self.client.pipeline(transaction=False)
            copies: list[tuple[str, int]] = []
            for function, values in actions:
                copy = next(self.names)
                for source, target in zip(keys_of(run).values(), keys_of(copy).values(), strict=True):
                    pipe.copy(source, target)
                times = 1
                if function == "lapse":
                    pipe.zadd(keys_of(copy)["heartbeats"], {values[0]: 1}, xx=True)
                elif function in ONCE:
                    times = 2
                    request = f"c 1 {next(self.requests)}"
                    for _ in range(times):
                        pipe.execute_command(*_fcall(copy, function, request, *values))
                else:
                    pipe.execute_command(*_fcall(copy, function, *values))
                pipe.execute_command(*_fcall(copy, "verify"))
                copies.append((copy, times))
            replies = iter(pipe.execute(raise_on_error=False))
            for copy, times in copies:
                for _ in NAMES:
                    next(replies)
                answers = [next(replies) for _ in range(times)]
                yield copy, Snapshot(next(replies)), answers


def _fcall(run: str, function: str, *values: object) -> tuple[Any, ...]:
    keys = keys_of(run).values()
    return ("FCALL", f"roq_{function}", len(keys), *keys, *values)


def _actions(snapshot: Snapshot) -> Iterator[Action]:
    """All calls that are possible now."""
    version = snapshot.number("version")
    for worker in WORKERS:
        for served in {version, max(0, version - 1)}:
            for limit in (1, 2):
                yield "reserve", (worker, served, limit)
        yield "leave", (worker,)
        yield "drain", (worker, "x", "me")
        if worker in snapshot.heartbeats:
            yield "lapse", (worker,)
            yield "renew", (worker, "", "", 0)
    for group in snapshot.index["reserved"]:
        yield "drop", (group, "x", "me")
        record = snapshot.groups[group]
        if "judgement" in record:
            yield from _judgements(group, record["judgement"])
        for m, member in enumerate(record["members"], 1):
            token = member["token"]
            if member["state"] == "leased":
                claim = (group, m, token, member["worker"])
                for reward in (0, 1 / 3) if snapshot.config["filter_zero_variance"] == "1" else (1,):
                    yield "complete", (*claim, reward, 1, member["v"], member["v"], PAYLOAD)
                yield "release", (*claim, "detach", b"")
                yield "release", (*claim, "detach", b"prefix")
                yield "fail", (*claim, "failed")
            if member["attempt"] > 1:  # the holder of the attempt before this one wakes up
                yield "complete", (group, m, token - 1, "a", 1, 1, version, version, PAYLOAD)
    for group in snapshot.index["occupied"]:
        yield "filter", (group, "x", "me")
        yield "reject", (group, "x", "me")
    for group in snapshot.batches.get(version, []):
        yield "reject", (group, "x", "me")
    for ordinal in snapshot.dead:
        yield "revive", (ordinal, "x", "me")
    yield "renew", ("observer", "", "", 0)
    yield "take", ("t", "")
    yield "publish", ("t", version + 1, "w", "")
    yield "checkpointed", ("t", version)


def _judgements(group: int, judgement: Any) -> Iterator[Action]:
    """The calls that a group's post-processing allows."""
    if judgement["state"] == "leased":
        claim = (group, judgement["token"], judgement["worker"])
        yield "judge", (*claim, 1, "", '["0.5"]')
        yield "judge", (*claim, 0, "dull", "")
        yield "fail", (group, 0, *claim[1:], "failed")
    if judgement["attempt"] > 1:  # the holder of the attempt before this one wakes up
        yield "judge", (group, judgement["token"] - 1, "a", 1, "", "")


def _canonical(snapshot: Snapshot) -> Any:
    """The state without names: groups, tokens, ordinals and times are replaced by their order, and of the
    two ways to name the workers the smaller is taken."""
    order: dict[int, int] = {}
    for batch in sorted(snapshot.batches):
        for group in snapshot.batches[batch]:
            order.setdefault(group, len(order))
    slots = sorted((place, kind, group) for place, (kind, group) in snapshot.slots.items())
    for _, _, group in slots:
        order.setdefault(group, len(order))
    records = sorted(snapshot.groups.values(), key=lambda record: order[record["group"]])
    queue = sorted(snapshot.pending_order, key=lambda name: snapshot.pending_order[name])
    unnamed = (
        tuple(snapshot.state[f] for f in ("version", "frontier", "checkpoint", "freed", "paused", "ended")),
        tuple((place, kind, order[group]) for place, kind, group in slots),
        tuple((b, tuple(order[g] for g in snapshot.batches[b])) for b in sorted(snapshot.batches)),
        tuple((order[int(name.split(".")[0])], name.split(".")[1]) for name in queue),
        tuple(entry.split()[1] for entry in snapshot.requeued),
        len(snapshot.dead),
    )

    def named(names: dict[str, str]) -> tuple[Any, ...]:
        groups = tuple(
            (
                record["v"],
                record["drops"],
                tuple(
                    (
                        m["state"],
                        names.get(m.get("worker", ""), ""),
                        m.get("v", -1),
                        m["failures"],
                        m.get("prefix", False),
                        m.get("reward", ""),
                        m.get("advantage", ""),
                    )
                    for m in (*record["members"], *([record["judgement"]] if "judgement" in record else []))
                ),
            )
            for record in records
        )
        leases = sorted((names.get(w, w), end == 1) for w, end in snapshot.lease_ends.items())
        going = sorted(names.get(w, w) for w, said in snapshot.workers.items() if '"draining":true' in said)
        return groups, tuple(leases), tuple(going)  # an end of 1 has expired unnoticed

    return unnamed, min(named({"a": "1", "b": "2"}), named({"a": "2", "b": "1"}))


def search(client: redis.Redis, config: RunConfig, depth: int) -> Found:
    """Visit every state within ``depth`` calls of the start; stops at the first broken invariant."""
    client.flushdb()
    client.execute_command("FUNCTION", "LOAD", "REPLACE", source())
    world = _World(client, config)
    start = world.create()
    found = Found()
    seen = {_canonical(world.look(start))}
    level: list[tuple[str, tuple[Action, ...]]] = [(start, ())]
    for _ in range(depth):
        following: list[tuple[str, tuple[Action, ...]]] = []
        for run, path in level:
            before = world.look(run)
            actions = list(_actions(before))
            done: list[str] = [run]
            for action, (copy, after, answers) in zip(actions, world.try_all(run, actions), strict=True):
                found.transitions += 1
                for problem in [*_answers(answers, before, after, found), *problems(after)]:
                    found.broken.append(f"after {[*path, action]}: {problem}")
                if found.broken:
                    return found
                key = _canonical(after)
                if key in seen:
                    done.append(copy)
                else:
                    seen.add(key)
                    following.append((copy, (*path, action)))
            world.forget(done)
        level = following
        found.levels.append(len(level))
        found.states = len(seen)
    return found


def _answers(answers: list[Any], before: Snapshot, after: Snapshot, found: Found) -> Iterator[str]:
    """The errors in the answers to an action."""
    first, last = answers[0], answers[-1]
    if isinstance(first, redis.ResponseError):
        found.refused += 1
        if not str(first).startswith("ROQ_"):
            yield f"it failed: {first}"
        if vars(after) != vars(before):
            yield f"it was refused ({first}) but changed something"
        if str(last) != str(first):
            yield f"its retry was answered {last} after {first}"
    elif last != first:
        yield f"its retry was answered {last} after {first}"


@click.command()
@click.option("--eta", default=1, show_default=True)
@click.option("--batch", default=2, show_default=True)
@click.option("--slots", default=2, show_default=True)
@click.option("--group", default=1, show_default=True)
@click.option("--candidates", default=None, type=int, help="Candidates of a group.  [default: as --group]")
@click.option("--post-process", is_flag=True, help="Groups are post-processed before they are placed.")
@click.option("--depth", default=7, show_default=True)
def main(
    eta: int, batch: int, slots: int, group: int, candidates: int | None, post_process: bool, depth: int
) -> None:
    """Search, and print the results."""
    config = RunConfig(
        eta=eta,
        batch_size=batch,
        buffer_slots=slots,
        group_size=group,
        group_candidates=candidates,
        post_process="module:function" if post_process else None,
        max_attempts=2,
        pause_after_failures=None,
    )
    with tempfile.TemporaryDirectory(prefix="roq-search-") as folder:
        server = Server("valkey", Path(folder))
        try:
            found = search(server.redis, config, depth)
        finally:
            server.kill()
    click.echo(
        f"{found.states} states, {found.transitions} transitions ({found.refused} refused), "
        f"by depth {found.levels}"
    )
    for problem in found.broken:
        raise SystemExit(problem)


if __name__ == "__main__":
    main()
