"""Random damage to the keys of a run, then every function of the library: none may take long, leave half of a
change behind, or touch another run.

    python -m tests.protocol.damage --kind redis --seeds 2000
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import redis

from roq import Fenced, Reservation, RunConfig, Scheduler
from roq.protocol.functions import FUNCTIONS
from roq.protocol.keys import KINDS, keys_of
from tests.conftest import KINDS as SERVERS
from tests.conftest import Server
from tests.protocol.play import expire, trajectory

__all__ = ["fuzz"]

COMMANDS = 2500  # in one call; the configurations below need less than 300 when nothing is damaged
CPU_S = 0.05  # of the server's processor, so that a busy machine does not matter

VALUES: tuple[Any, ...] = (
    b"", b"x", b"0", b"1", b"-1", b"7", b"0.5", b"1e12", b"9007199254740991", b"9007199254740993", b"1e400",
    b"nan", b"0x10", b"\xff\xfe", b"3 5", b"1 2 3 4 5 6 7 8 9 10 11 12", b"{}", b"[]", b"null",
    b'{"members":[]}',
    b'{"group":1,"ordinal":0,"v":1e12,"members":[{"state":"leased","token":1}]}', b"[" * 3000, b"1 " * 20000,
    b"reserved 1", b"occupied 999999",
)  # fmt: skip
SCORES = (0, 1, -1, 0.5, 7, 1e6, 1e6 + 1, 2e6 + 1.5, 5e9, 1e12, 1e15, 9e15, 1e300, "inf", "-inf")
MEMBERS = (b"", b"x", b"1", b"2", b"007", b"1.1", b"2.9", b"0.0", b"999999", b"w0", b"w0 1.1", b"w0 x",
           b"w9 1.2", b"w0 000000000001 1.1 3 lost", b"\xff" * 20, b"9007199254740993")  # fmt: skip
CONFIGS = (
    RunConfig(eta=1, batch_size=2, group_size=2, max_attempts=2),
    RunConfig(eta=3, batch_size=2, buffer_slots=4, group_size=1, group_candidates=2, stuck_timeout_s=0.001),
    RunConfig(eta=0, batch_size=3, post_process="a:b", max_inflight=9, max_payload_bytes=10_000, prompts=40),
)


def history(sched: Scheduler, config: RunConfig, draw: random.Random) -> list[Reservation]:
    """A run in the middle of things; returns the claims that were given."""
    sched.create(config)
    claims: list[Reservation] = []
    version = 0
    for _ in range(draw.randint(8, 30)):
        worker = draw.choice(("w0", "w1", "w2"))
        found = sched.reserve(worker, version, draw.randint(1, 6)).reservations
        claims += found
        for claim in found:
            with suppress(Fenced):  # its group left with another member
                _work(sched, claim, version, draw)
        if draw.random() < 0.3 and sched.take("t") is not None and draw.random() < 0.8:
            version += 1
            sched.publish(version, f"w/{version}", "t")
        if draw.random() < 0.1 and any(w.worker == worker for w in sched.status().workers):
            expire(sched, worker)
    return claims


def _work(sched: Scheduler, claim: Reservation, version: int, draw: random.Random) -> None:
    what = draw.random()
    if claim.member == 0 or what < 0.1:
        sched.fail(claim, "x") if draw.random() < 0.5 else sched.release(claim)
    elif what < 0.7:
        done = sched.complete(claim, trajectory(version, draw.random()))
        if done.judgement is not None and draw.random() < 0.8:
            sched.judge(done.judgement)
    elif what < 0.8:
        sched.save_prefix(claim, trajectory(version))


def damage(client: redis.Redis, name: str, key: str, draw: random.Random) -> str:
    """Do one thing to a key; returns what."""
    kind = KINDS[name]
    what = draw.random()
    if what < 0.06:
        client.delete(key)
        return f"{name} deleted"
    if what < 0.12:
        client.delete(key)
        other = draw.choice(["hash", "zset", "list", "stream", "string"])
        {
            "hash": lambda: client.hset(key, "a", "b"),
            "zset": lambda: client.zadd(key, {"a": 1}),
            "list": lambda: client.rpush(key, "a"),
            "stream": lambda: client.xadd(key, {"a": "b"}),
            "string": lambda: client.set(key, "a"),
        }[other]()
        return f"{name} made a {other}"
    value, member, score = draw.choice(VALUES), draw.choice(MEMBERS), draw.choice(SCORES)
    if kind == "hash":
        fields = sorted(client.hkeys(key))
        field = (
            draw.choice(fields) if fields and draw.random() < 0.9 else draw.choice((b"0", b"1", b"w0", b"x"))
        )
        old = client.hget(key, field) or b""
        if what < 0.2:
            client.hdel(key, field)
            return f"{name} {field!r} deleted"
        if what < 0.4 and old:  # one character of it
            at = draw.randrange(len(old))
            value = old[:at] + draw.choice((b"", b"9", b"-", b'"', b"e9", b"\xff")) + old[at + 1 :]
        client.hset(key, field, value)
        return f"{name} {field!r} = {value[:60]!r}"
    if kind == "zset":
        members = client.zrange(key, 0, -1)
        if members and what < 0.3:
            client.zrem(key, draw.choice(members))
            return f"{name} lost a member"
        if members and what < 0.7:
            member = draw.choice(members)
        if what > 0.9:
            client.zadd(key, {b"%d" % n: 1e6 + n for n in range(3000)})
            return f"{name} got 3000 members"
        client.zadd(key, {member: score})
        return f"{name} {member!r} = {score}"
    if kind == "list":
        client.lpush(key, value)
        return f"{name} begins with {value[:60]!r}"
    top = draw.choice(("*", "18446744073709551615-18446744073709551615"))
    try:
        client.xadd(key, {"a": value}, id=top)
    except redis.ResponseError:
        client.xtrim(key, 0)
    return f"{name} got {top}"


def calls(
    claims: list[Reservation], version: int, draw: random.Random
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A plausible call of every function, in random order."""
    claim = draw.choice(claims[-12:])
    group, member, token, worker = claim.group, claim.member, claim.token, claim.worker
    payload = trajectory(version).encode()
    some = draw.choice((group, 1, 2, 3))
    table: dict[str, tuple[Any, ...]] = {
        "create": ("{}", ""),
        "configure": (draw.choice(('{"stuck_timeout_ms": "9"}', '{"eta": "3"}', "[", "{}")), "me"),
        "reserve": (worker, version, draw.choice((1, 40))),
        "renew": (worker, version, "{}", draw.choice((0, 1, 5))),
        "complete": (group, member, token, worker, 1.0, 2, version, version, payload),
        "judge": (group, token, worker, draw.choice((0, 1)), "x", ""),
        "release": (group, member, token, worker, "x", draw.choice((b"", payload))),
        "fail": (group, member, token, worker, "x"),
        "save_prefix": (group, member, token, worker, payload),
        "drain": (worker, "x", "me"),
        "leave": (worker,),
        "pin": (worker, ""),
        "take": (draw.choice(("t", "t2")), draw.choice(("", version, max(0, version - 1)))),
        "publish": (draw.choice(("t", "t2")), version + 1, "w", ""),
        "announce_sender": ("t", "here"),
        "checkpointed": ("t", version),
        "retire_weights": ("t", 1),
        "drop": (some, "x", "me"),
        "filter": (some, "x", "me"),
        "reject": (some, "x", "me"),
        "revive": (draw.choice((0, 1, 2)), "x", "me"),
        "pause": ("x", "me"),
        "resume": ("x", "me"),
        "status": (),
        "verify": (),
    }
    assert table.keys() == {f.name for f in FUNCTIONS} - {"version"}
    once = {f.name for f in FUNCTIONS if f.once}
    for name in draw.sample(sorted(table), len(table)):
        request = (draw.choice(("", f"c 1 {draw.randrange(1, 99)}")),) if name in once else ()
        yield name, (*request, *table[name])


READERS: dict[bytes, Callable[[Any, str], Any]] = {
    b"hash": lambda client, key: client.hgetall(key),
    b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"stream": lambda client, key: client.xrange(key),
    b"string": lambda client, key: client.get(key),
    b"none": lambda client, key: client.exists(key),
}


def contents(client: redis.Redis, run: str) -> dict[str, Any]:
    """Everything that the keys of a run hold."""
    keys = keys_of(run)
    pipe = client.pipeline(transaction=False)
    for key in keys.values():
        pipe.type(key)
    kinds = pipe.execute()
    for kind, key in zip(kinds, keys.values(), strict=True):
        READERS[kind](pipe, key)
    return dict(zip(keys, zip(kinds, pipe.execute(), strict=True), strict=True))


def cost(client: redis.Redis, command: tuple[Any, ...]) -> tuple[str, int, float]:
    """The error reply to a call, and the commands and the seconds of its processor that the server spent."""
    client.config_resetstat()
    before, refused = client.info("cpu"), ""
    try:
        client.execute_command(*command)
    except redis.ResponseError as error:
        refused = str(error)
    after, stats = client.info("cpu"), client.info("commandstats")
    return (
        refused,
        sum(stat["calls"] for name, stat in stats.items() if "fcall" not in name and "config" not in name),
        sum(after[time] - before[time] for time in ("used_cpu_user", "used_cpu_sys")),
    )


def fuzz(server: Server, seed: int) -> list[str]:
    """Damage one run in one or two places and call every function; returns what went wrong."""
    draw = random.Random(seed)
    client = redis.Redis(unix_socket_path=str(server.socket), socket_timeout=10)
    client.flushall()
    found: list[str] = []
    with Scheduler(server.url, "damaged") as sched, Scheduler(server.url, "other") as other:
        claims = history(sched, draw.choice(CONFIGS), draw)
        history(other, CONFIGS[0], draw)
        untouched = contents(client, "other")
        version = sched.status().version
        keys = keys_of("damaged")
        done: list[str] = []
        for _ in range(draw.choice((1, 1, 2))):
            name = draw.choice((*keys, "state", "groups", "slots", "reserved", "occupied", "batches"))
            done.append(damage(client, name, keys[name], draw))
        for function, values in calls(claims, version, draw):
            before = contents(client, "damaged")
            command = ("FCALL", f"roq_{function}", len(keys), *keys.values(), *values)
            refused, commands, seconds = cost(client, command)
            where = f"seed {seed}: {done}: {function} {[str(value)[:40] for value in values]}: {refused}"
            if commands > COMMANDS or seconds > CPU_S:
                found.append(f"{where} took {commands} commands and {seconds:.3f} s")
            if refused and not refused.startswith("ROQ_"):
                found.append(f"{where} is no refusal")
            if refused and (after := contents(client, "damaged")) != before:
                changed = [name for name in keys if after[name] != before[name]]
                found.append(f"{where} left a half-made change of {changed}")
        if contents(client, "other") != untouched or other.verify():
            found.append(f"seed {seed}: {done}: the other run changed")
    client.close()
    return found


@click.command()
@click.option("--kind", type=click.Choice(SERVERS), default="valkey", show_default=True)
@click.option("--seeds", default=500, show_default=True)
@click.option("--first", default=0, show_default=True)
def main(kind: str, seeds: int, first: int) -> None:
    """Fuzz, and print what went wrong."""
    with tempfile.TemporaryDirectory(prefix="roq-damage-") as folder:
        server = Server(kind, Path(folder))
        try:
            found = [problem for seed in range(first, first + seeds) for problem in fuzz(server, seed)]
        finally:
            server.kill()
    click.echo(json.dumps({"seeds": seeds, "problems": len(found)}))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
