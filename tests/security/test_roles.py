"""Each role does its work, and nothing else: on both servers, with the rules that ``roq acl`` prints."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from click.testing import CliRunner

from roq import (
    AsyncScheduler,
    ConfigError,
    NotAllowed,
    Prefix,
    Refused,
    Reservation,
    RunConfig,
    Scheduler,
    UnknownRun,
    UnsuitableServer,
    _library,
)
from roq._functions import FUNCTIONS
from roq.acl import _NEVER_WRITES, _READS, ROLES, _library_commands, role_functions, rules
from roq.cli import main
from tests.conftest import Server
from tests.protocol.play import expire, trajectory
from tests.security.conftest import As, make_users, url_of

CONFIG = RunConfig(
    eta=2,
    batch_size=2,
    buffer_slots=3,
    group_size=2,
    group_candidates=3,
    prompts=400,
    lease_s=30.0,
    filter_zero_variance=True,
    max_attempts=2,
    max_inflight=30,
)


def calls(scheduler: Scheduler) -> dict[str, Callable[[], Any]]:
    """One call of every function, by its name."""
    held = Reservation(
        group=1, member=1, token=1, ordinal=0, v_traj=0, buffer=0, slot=1, attempt=1, worker="w0", prefix=None
    )
    post = msgspec.structs.replace(held, member=0)
    return {
        "create": lambda: scheduler.create(CONFIG, weights="w"),
        "reserve": lambda: scheduler.reserve("w0", 0, 4),
        "renew": lambda: scheduler.renew("w0", 0, {}),
        "complete": lambda: scheduler.complete(held, trajectory()),
        "finish": lambda: scheduler.finish(post),
        "release": lambda: scheduler.release(held),
        "save_prefix": lambda: scheduler.save_prefix(held, Prefix([1], [-0.1], [(0, 1)])),
        "leave": lambda: scheduler.leave("w0"),
        "pin": lambda: scheduler.pin("w0"),
        "take": lambda: scheduler.take("t0"),
        "publish": lambda: scheduler.publish(1, "w1", "t0"),
        "checkpointed": lambda: scheduler.checkpointed(0, "t0"),
        "retire_weights": lambda: scheduler.retire_weights("t0", 1),
        "drop": lambda: scheduler.drop(1, "test"),
        "filter": lambda: scheduler.filter(1, "test"),
        "drain": lambda: scheduler.drain("w0"),
        "revive": lambda: scheduler.revive(1),
        "pause": scheduler.pause,
        "status": scheduler.status,
        "verify": scheduler.verify,
    }


def test_every_function_has_a_role() -> None:
    given = {function.name for role in ROLES for function in role_functions(role)}
    assert given == {function.name for function in FUNCTIONS}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_its_functions_only(role: str, acting_as: As) -> None:
    acting_as("admin").create(CONFIG, weights="w")
    scheduler = acting_as(role)
    mine = {function.name for function in role_functions(role)}
    for name, call in calls(scheduler).items():
        if name not in mine:
            with pytest.raises(NotAllowed, match="use a user whose role may"):
                call()
        else:
            attempt(call)


NOBODY = (
    "FLUSHALL",
    "FLUSHDB",
    "EVAL return(1) 0",
    "EVALSHA x 0",
    "SCRIPT LOAD x",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "ACL LIST",
    "ACL SETUSER roq-worker +@all",
    "FUNCTION DELETE roq",
    "FUNCTION FLUSH",
    "SHUTDOWN",
    "REPLICAOF h 1",
    "MONITOR",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SET mine 1",
    "GET other",
    "HGETALL roq:{other}:config",
    "HSET roq:{other}:state version 9",
    "PUBLISH channel x",
    "SUBSCRIBE channel",
    "RENAME roq:{test}:state roq:{test}:x",
    "COPY roq:{test}:state roq:{test}:x",
    "MIGRATE h 1 k 0 1",
)


@pytest.mark.parametrize("role", ROLES)
def test_nobody(role: str, acting_as: As) -> None:
    client = acting_as(role)._redis
    for command in NOBODY:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_may_not_write_by_hand(role: str, server: Server, acting_as: As) -> None:
    acting_as("admin").create(CONFIG, weights="w")
    client = acting_as(role)._redis
    keys = acting_as(role)._operations.keys
    for name in _NEVER_WRITES.get(role, tuple(keys)):
        for command in ("HSET", "HDEL"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(command, keys[name], "1", *(["x"] if command == "HSET" else []))
        if role != "admin":
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.delete(keys[name])
    assert client.execute_command("HGET", keys["weights"], "0") == b"w", "everybody may read"
    if role != "admin":
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.function_load(_library.source(), replace=True)


def test_no_function_of_a_role_writes_what_the_role_may_not() -> None:
    """A command that fails within a function leaves what was written before it: so none may fail."""
    folder = _library._folder()
    for role, forbidden in _NEVER_WRITES.items():
        sources = [*sorted((folder / "lib").glob("*.lua"))]
        sources += [folder / "functions" / f"{function.name}.lua" for function in role_functions(role)]
        for source in sources:
            for command, key in re.findall(
                r'redis\.call\(\s*"(\w+)",\s*(?:run\.)?key\.(\w+)', source.read_text()
            ):
                assert command in _READS or key not in forbidden, f"{role}: {source.name} has {command} {key}"


def test_the_library_issues_commands_by_name() -> None:
    """Otherwise the rules, made from its source, would lack some."""
    source = _library.source()
    source = re.sub(r"--.*", "", source)
    by_variable = re.findall(r'redis\.p?call\((?!\s*"[A-Z]+").*', source)
    assert len(by_variable) == 1, "slots.lua looks for the first or the last"
    assert {"ZRANGEBYSCORE", "ZREVRANGEBYSCORE"} <= _READS
    assert {"TIME", "HSET", "ZPOPMIN", "RPUSH"} <= _library_commands()


def test_a_run_with_each_process_under_its_role(server: Server, acting_as: As) -> None:
    """Some thousand calls of all kinds, at random: no command of theirs is refused by the rules."""
    dice = random.Random(11)
    config = msgspec.structs.replace(CONFIG, post_process="some:function")
    acting_as("admin").create(config, weights="w0")
    worker, trainer, operator, board = map(acting_as, ("worker", "trainer", "operator", "board"))
    server.redis.acl_log_reset()
    version, taken, steps = 0, False, 0
    held: list[Any] = []
    names = [f"w{i}" for i in range(4)]
    for turn in range(1500):
        name = dice.choice(names)
        match dice.randrange(12):
            case 0 | 1 | 2:
                held += worker.reserve(name, worker.pin(name).version, dice.randint(1, 6)).reservations
            case 3 | 4 | 5 | 6 if held:
                claim = held.pop(dice.randrange(len(held)))
                if claim.member == 0:
                    attempt(worker.finish, claim, keep=dice.random() < 0.9, reason="the dice")
                    continue
                done = attempt(worker.complete, claim, trajectory(claim.v_traj, dice.choice([0.0, 1.0])))
                held += [done.finish] if done is not None and done.finish is not None else []
            case 7 if held:
                claim = held.pop()
                kept = Prefix([1, 2], [-0.1, -0.2], [(claim.v_traj, 2)])
                if claim.member == 0:
                    kept = None
                elif dice.random() < 0.5:
                    attempt(worker.save_prefix, claim, kept)
                reason = dice.choice(["error", "detach"])
                attempt(worker.release, claim, kept, reason, "the dice")
            case 8:
                worker.renew(name, version, {"doing": "dice"})
                if turn % 40 == 0:
                    expire_some(server, worker, name)
            case 9:
                if not taken and trainer.take("t0", version) is not None:
                    taken = True
                elif taken:
                    version, taken, steps = version + 1, False, steps + 1
                    trainer.publish(version, f"w{version}", "t0", {"reward/mean": 0.5})
                    if version % 3 == 0:
                        trainer.checkpointed(version, "t0")
                    trainer.retire_weights("t0", 2)
            case 10 if held:
                who = dice.choice([trainer, operator])
                attempt(dice.choice([who.drop, who.filter]), dice.choice(held).group, "the dice")
            case 11:
                operator.pause()
                assert board.status().paused
                operator.resume()
                for letter in operator.dead()[:1]:
                    operator.revive(letter.ordinal)
                if turn % 7 == 0:
                    attempt(operator.drain, name)
                if turn % 5 == 0:
                    attempt(worker.leave, name)
            case _:
                assert board.verify() == []
    assert steps >= 10
    seen = {fields[b"event"] for _, fields in server.redis.xrange("roq:{test}:events")}
    assert {b"filtered", b"dead", b"revived", b"requeued", b"expired", b"draining", b"worker_lost"} <= seen
    assert board.verify() == []
    assert board.audit().problems == []
    # redis-py names itself where it may
    assert {entry["object"] for entry in server.redis.acl_log()} <= {"client|setinfo"}


def attempt(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Make a call that the protocol may refuse; None when it did."""
    with suppress(Refused):
        return call(*arguments, **named)


def expire_some(server: Server, worker: Scheduler, name: str) -> None:
    with Scheduler(server.url, worker.run) as admin:
        expire(admin, name)


def test_without_the_library(server: Server, acting_as: As, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that may not load it says so, and what to do."""
    server.redis.function_flush("SYNC")
    with pytest.raises(UnsuitableServer, match="no roq library, and this user may not load it; run"):
        acting_as("worker").status()
    acting_as("admin").create(CONFIG)
    assert acting_as("worker").status().version == 0
    loaded = server.redis.fcall_ro("roq_version", 0).decode()
    monkeypatch.setattr(_library, "version", lambda: "2 0123456789ab")
    with pytest.raises(UnsuitableServer, match=f"has roq library {loaded}, this client needs 2 0123456789ab"):
        acting_as("worker").status()
    monkeypatch.setattr(_library, "version", lambda: "1 0123456789ab")
    assert acting_as("worker").status().version == 0, "of one revision, so they work together"


async def test_the_same_of_the_asynchronous_client(server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path)
    server.redis.function_flush("SYNC")
    async with AsyncScheduler(url_of(server, tmp_path, "worker"), "test") as worker:
        with pytest.raises(UnsuitableServer, match="may not load it; run"):
            await worker.status()
        async with AsyncScheduler(url_of(server, tmp_path, "admin"), "test") as admin:
            await admin.create(CONFIG)
        assert (await worker.reserve("w0", 0, 1)).reservations
        with pytest.raises(NotAllowed, match="roq acl"):
            await worker.publish(1, "w", "t0")


def test_rules_of_another_version_of_roq(server: Server, acting_as: As) -> None:
    """A command inside a function that the rules lack: told as such."""
    acting_as("admin").create(CONFIG)
    words = [word.replace("+zadd ", "") for word in rules("worker", ["test"])]
    server.redis.execute_command("ACL", "SETUSER", "roq-worker", "reset", ">pw", *words)
    scheduler = Scheduler(f"{server.url}?username=roq-worker&password=pw", "test")
    with scheduler, pytest.raises(NotAllowed, match="another version of roq, make them anew with roq acl"):
        scheduler.reserve("w0", 0, 1)


def test_a_role_is_for_its_runs(server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path, "exp-*", "other")
    for run, allowed in (
        ("exp-1", True),
        ("exp-2.b", True),
        ("other", True),
        ("others", False),
        ("exp", False),
    ):
        with Scheduler(url_of(server, tmp_path, "admin"), run) as admin:
            if allowed:
                assert admin.create(CONFIG)
            else:
                with pytest.raises(NotAllowed):
                    admin.create(CONFIG)
    with pytest.raises(ConfigError, match="is no run's name"):
        rules("worker", ["a b"])
    with pytest.raises(ConfigError, match="no role 'boss'"):
        rules("boss", ["a"])


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_an_aclfile(kind: str, tmp_path: Path) -> None:
    """The server starts with the file; who does not log in can do nothing; no password is printed."""
    folder = tmp_path / "secrets"
    options = ("acl", "--run", "test", "--passwords", str(folder))
    done = CliRunner().invoke(main, [*options, "--file"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(main, [*options, "--file"])
    assert again.stdout == done.stdout, "passwords are kept"
    for role in ROLES:
        assert (folder / role).stat().st_mode & 0o777 == 0o600
        assert (folder / role).read_text().strip() not in done.output
    (tmp_path / "users.acl").write_text(done.stdout)
    server = Server(kind, tmp_path, "--aclfile", str(tmp_path / "users.acl"))
    try:
        with Scheduler(server.url, "test") as nobody, pytest.raises(ConfigError, match="refused the login"):
            nobody.status()
        with Scheduler(url_of(server, folder, "admin"), "test") as admin:
            assert admin.create(CONFIG)
        with Scheduler(url_of(server, folder, "board"), "test") as board:
            assert board.verify() == []
            with pytest.raises(NotAllowed):
                board.reserve("w0", 0, 1)
        (folder / "board").write_text("wrong")
        board = Scheduler(url_of(server, folder, "board"), "test")
        with board, pytest.raises(ConfigError, match="refused the login") as error:
            board.status()
        assert "wrong" not in str(error.value)
    finally:
        server.kill()


def test_commands_for_redis_cli(server: Server, tmp_path: Path) -> None:
    (tmp_path / "worker").write_text("open sesame\n")
    done = CliRunner().invoke(
        main, ["acl", "--run", "test", "--role", "worker", "--passwords", str(tmp_path)]
    )
    (line,) = done.stdout.splitlines()
    assert server.redis.execute_command(*line.split()) == b"OK"
    assert "open sesame" not in done.output
    server.redis.function_load(_library.source(), replace=True)
    with Scheduler(url_of(server, tmp_path, "worker"), "test") as worker, pytest.raises(UnknownRun):
        worker.status()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--run", "a b"),
        ("--run", ""),
        ("--run", "a", "--prefix", "x y"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["acl", *arguments, "--passwords", str(tmp_path / "secrets")])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert not (tmp_path / "secrets").exists()
