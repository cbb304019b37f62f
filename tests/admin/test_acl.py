"""Each role does its work, and nothing else: on both servers, with the rules that ``roq acl`` prints."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    Reservation,
    Response,
    RunConfig,
    Scheduler,
    UnknownRun,
    UnsuitableServer,
)
from roq.admin.acl import (
    _NEVER_WRITES,
    _READS,
    _library_commands,
    rules,
    setuser_commands,
)
from roq.admin.backup import export_run
from roq.board.feed import RunFeed
from roq.cli import main
from roq.protocol import library
from roq.protocol.functions import FUNCTIONS, ROLES, role_functions
from roq.protocol.keys import keys_of
from tests.admin.dice import DICE, Dice, attempt
from tests.conftest import Server
from tests.protocol.play import direct, trajectory
from tests.users import As, make_users, url_of

CONFIG = RunConfig(eta=1, batch_size=2)


def calls(scheduler: Scheduler) -> dict[str, Callable[[], Any]]:
    """One call of every function, by its name."""
    held = Reservation(
        group=1, member=1, token=1, ordinal=0, v_traj=0, buffer=0, slot=1, attempt=1, worker="w0", prefix=None
    )
    post = msgspec.structs.replace(held, member=0)
    return {
        "create": lambda: scheduler.create(CONFIG, weights="w"),
        "configure": lambda: scheduler.configure({}),
        "reserve": lambda: scheduler.reserve("w0", 0, 4),
        "renew": lambda: scheduler.renew("w0", 0, {}),
        "complete": lambda: scheduler.complete(held, trajectory()),
        "judge": lambda: scheduler.judge(post),
        "release": lambda: scheduler.release(held),
        "fail": lambda: scheduler.fail(held, "test"),
        "save_prefix": lambda: scheduler.save_prefix(held, Response([1], [-0.1], [(0, 1)])),
        "leave": lambda: scheduler.leave("w0"),
        "pin": lambda: scheduler.pin("w0"),
        "take": lambda: scheduler.take("t0"),
        "publish": lambda: scheduler.publish(1, "w1", "t0"),
        "announce_sender": lambda: scheduler.announce_sender("h:1/s", "t0"),
        "checkpointed": lambda: scheduler.checkpointed(0, "t0"),
        "retire_weights": lambda: scheduler.retire_weights("t0", 1),
        "drop": lambda: scheduler.drop(1, "test"),
        "filter": lambda: scheduler.filter(1, "test"),
        "reject": lambda: scheduler.reject(1, "test"),
        "drain": lambda: scheduler.drain("w0"),
        "revive": lambda: scheduler.revive(1),
        "pause": scheduler.pause,
        "resume": scheduler.resume,
        "status": scheduler.status,
        "verify": scheduler.verify,
    }


def test_every_function_has_a_role() -> None:
    given = {function.name for role in ROLES for function in role_functions(role)}
    assert (
        given
        == {function.name for function in FUNCTIONS}
        == {*calls(Scheduler("redis://nowhere", "r")), "version"}
    )


def name_of_a_role(function: str) -> str:
    return next(role for role in ROLES if function in {f.name for f in role_functions(role)})


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_its_functions_only(role: str, acting_as: As) -> None:
    acting_as("admin").create(CONFIG, weights="w")
    scheduler = acting_as(role)
    mine = {function.name for function in role_functions(role)}
    for name, call in calls(scheduler).items():
        if name not in mine:
            with pytest.raises(NotAllowed, match=name_of_a_role(name)):
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
    "RENAME roq:{test}:state mine",
    "COPY roq:{test}:state roq:{test}:x",
    "MIGRATE h 1 k 0 1",
)


@pytest.mark.parametrize("role", ROLES)
def test_nobody(role: str, acting_as: As) -> None:
    with direct(acting_as(role)) as client:
        for command in NOBODY:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_may_not_write_by_hand(role: str, server: Server, acting_as: As) -> None:
    acting_as("admin").create(CONFIG, weights="w")
    keys = keys_of("test")
    with direct(acting_as(role)) as client:
        for name in _NEVER_WRITES.get(role, tuple(keys)):
            for command in ("HSET", "HDEL"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(command, keys[name], "1", *(["x"] if command == "HSET" else []))
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.delete(keys[name])
        assert client.execute_command("HGET", keys["weights"], "0") == b"w", "everybody may read"
        if role not in ("admin", "owner"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.function_load(library.source(), replace=True)


def test_no_function_of_a_role_writes_what_the_role_may_not() -> None:
    """A command that fails within a function leaves what was written before it: so none may fail."""
    lua = library._folder()
    for role, forbidden in _NEVER_WRITES.items():
        sources = [*sorted((lua / "lib").glob("*.lua"))]
        sources += [lua / "functions" / f"{function.name}.lua" for function in role_functions(role)]
        for source in sources:
            for command, key in re.findall(
                r'redis\.call\(\s*"(\w+)",\s*(?:run\.)?key\.(\w+)', source.read_text()
            ):
                assert command in _READS or key not in forbidden, f"{role}: {source.name} has {command} {key}"


def test_the_library_issues_commands_by_name() -> None:
    """Otherwise the rules, made from its source, would lack some."""
    source = library.source()
    source = re.sub(r"--.*", "", source)
    by_variable = re.findall(r'redis\.p?call\((?!\s*"[A-Z]+").*', source)
    assert len(by_variable) == 3, "slots.lua looks for the first or the last; changes.lua does what it noted"
    assert not re.findall(r'changes\.later\((?!\s*"[A-Z]+"|command).*', source)
    assert {"LPUSH", "RPOP", "XADD"} <= _library_commands()
    assert {"ZRANGEBYSCORE", "ZREVRANGEBYSCORE"} <= _READS
    assert {"TIME", "HSET", "ZADD", "RPUSH"} <= _library_commands()


def test_a_run_with_each_process_under_its_role(server: Server, acting_as: As) -> None:
    """Some thousand calls of all kinds, at random: no command of theirs is refused by the rules."""
    acting_as("admin").create(DICE, weights="w0")
    board = acting_as("board")
    server.redis.acl_log_reset()
    dice = Dice(acting_as("worker"), acting_as("trainer"), acting_as("operator"), server)
    for turn in range(1500):
        dice.turn()
        if turn % 10 == 0:
            assert board.verify() == []
    assert dice.version >= 10
    seen = {fields[b"event"] for _, fields in server.redis.xrange("roq:{test}:events")}
    assert {b"filtered", b"dead", b"revived", b"requeued", b"expired", b"draining", b"worker_lost"} <= seen
    assert board.audit().problems == []
    # redis-py names itself where it may
    assert {entry["object"] for entry in server.redis.acl_log()} <= {"client|setinfo"}


@pytest.mark.parametrize("role", ROLES)
def test_everybody_may_look(role: str, acting_as: As) -> None:
    """All that status, watch, metrics, board and audit ask."""
    acting_as("admin").create(CONFIG, weights="w")
    for claim in acting_as("worker").reserve("w0", 0, 2).reservations:
        acting_as("worker").complete(claim, trajectory())
    batch = acting_as("trainer").take("t0")
    assert batch is not None
    sched = acting_as(role)
    assert sched.status().training == 0
    assert sched.verify() == []
    assert sched.audit().problems == []
    assert sched.config().eta == 1
    assert sched.settings() == {}
    assert sched.events()[0].name == "created"
    assert sched.newest_event("take") is not None
    assert sched.call_stats()["fcall"].calls > 0
    assert len(sched.slots()) == 2
    assert sched.dead() == []
    assert len(sched.trajectories(batch.groups)) == 2
    assert len(sched.group_trajectories(1)) == 1
    assert sched.wait(0, 0.01) >= 0
    assert sched.wait(0, 0.01, batch=True) >= 0


def test_without_the_library(server: Server, acting_as: As, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that may not load it says so, and what to do."""
    server.redis.function_flush("SYNC")
    with pytest.raises(UnsuitableServer, match="roq library"):
        acting_as("worker").status()
    acting_as("admin").create(CONFIG)
    assert acting_as("worker").status().version == 0
    loaded = server.redis.fcall_ro("roq_version", 0).decode()
    newer = f"{library.REVISION + 1} 0123456789ab"
    monkeypatch.setattr(library, "version", lambda: newer)
    with pytest.raises(UnsuitableServer, match=f"{loaded}.*{newer}"):
        acting_as("worker").status()
    monkeypatch.setattr(library, "version", lambda: f"{library.REVISION} 0123456789ab")
    assert acting_as("worker").status().version == 0, "same revision, so they are compatible"


async def test_the_same_of_the_asynchronous_client(server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path)
    server.redis.function_flush("SYNC")
    async with AsyncScheduler(url_of(server, tmp_path, "worker"), "test") as worker:
        with pytest.raises(UnsuitableServer, match="roq library"):
            await worker.status()
        async with AsyncScheduler(url_of(server, tmp_path, "admin"), "test") as admin:
            await admin.create(CONFIG)
        assert (await worker.reserve("w0", 0, 1)).reservations
        with pytest.raises(NotAllowed, match="roq acl"):
            await worker.publish(1, "w", "t0")


def test_rules_of_another_version_of_roq(server: Server, acting_as: As) -> None:
    """A command inside a function that the rules lack: told as such."""
    acting_as("admin").create(CONFIG)
    words = [re.sub(r"\+zadd ", "", word) for word in rules("worker", ["test"])]
    server.redis.execute_command("ACL", "SETUSER", "roq-worker", "reset", ">pw", *words)
    scheduler = Scheduler(f"{server.url}?username=roq-worker&password=pw", "test")
    with scheduler, pytest.raises(NotAllowed, match="roq acl"):
        scheduler.reserve("w0", 0, 1)


NEEDS = {
    "pause": "operator",
    "resume": "operator",
    "drop --group 1": "trainer or operator",
    "filter --group 1": "trainer or operator",
    "reject --group 1": "trainer or operator",
    "drain --worker w0": "operator",
    "dead --revive 0": "operator",
    "export --out copy.roq": "admin",
    "import run.roq --yes": "admin",
    "init job.toml": "admin",
}
LOOKS = ("status", "buffers", "workers", "verify", "events", "group 1", "audit", "dead", "doctor")


def test_a_command_names_the_role_that_it_needs(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: Callable[..., Path],
    folder: Path,
) -> None:
    monkeypatch.chdir(folder)
    make_users(server, tmp_path, "test", "gone", "new")
    job(run__name="new")
    with Scheduler(server.url, "test") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, max_attempts=1))
        held, _ = sched.reserve("w0", 0, 2).reservations
        sched.fail(held, "the tool is broken")
    with Scheduler(server.url, "gone") as sched:
        sched.create(CONFIG)
    export_run(server.url, "gone", folder / "run.roq")
    server.redis.delete(*keys_of("gone").values())
    board = url_of(server, tmp_path, "board")

    def call(command: str, run: str = "test") -> Any:
        named = () if command.split(maxsplit=1)[0] in ("import", "init") else ("--run", run)
        return CliRunner().invoke(main, [*command.split(), "--redis", board, *named])

    for command, role in NEEDS.items():
        done = call(command)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), (command, done.output)
        assert f"use a user of role {role} or owner with rules for this run" in done.stderr, command
    for command in LOOKS:
        assert call(command).exit_code in (0, 1), command
        if command != "doctor":
            assert "use a user of any role with rules for this run" in call(command, "other").stderr, command


@pytest.mark.parametrize("role", ROLES)
async def test_the_board_looks_under_every_role(role: str, server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path)
    for command in setuser_commands(["owner"], ["test"], "roq-", tmp_path):
        server.redis.execute_command(*command.split())
    with Scheduler(server.url, "test") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, event_log=100))
        for _ in range(200):  # the first events are trimmed: the page begins with a picture
            sched.pause()
            sched.resume()
    feed = RunFeed(url_of(server, tmp_path, role), "test")
    await feed.start()
    try:
        first = await anext(feed.messages(None))
    finally:
        await feed.stop()
    assert first.kind == "begin", first
    assert msgspec.json.decode(first.data)["picture"]["version"] == 0


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
    with pytest.raises(ConfigError, match="'a b'"):
        rules("worker", ["a b"])
    with pytest.raises(ConfigError, match="boss"):
        rules("boss", ["a"])


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_an_aclfile(kind: str, tmp_path: Path) -> None:
    """The server starts with the file; who does not log in can do nothing; no password is printed."""
    secrets = tmp_path / "secrets"
    options = ("acl", "--run", "test", "--passwords", str(secrets))
    done = CliRunner().invoke(main, [*options, "--file"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(main, [*options, "--file"])
    assert again.stdout == done.stdout, "passwords are kept"
    assert {path.name for path in secrets.iterdir()} == set(ROLES) - {"owner"}
    for role in set(ROLES) - {"owner"}:
        assert (secrets / role).stat().st_mode & 0o777 == 0o600
        assert (secrets / role).read_text().strip() not in done.output
    (tmp_path / "users.acl").write_text(done.stdout)
    durable = ["--appendonly", "yes", "--appendfsync", "always"]
    server = Server(kind, tmp_path, "--aclfile", str(tmp_path / "users.acl"), *durable)
    try:
        with Scheduler(server.url, "test") as nobody, pytest.raises(ConfigError, match=re.escape(server.url)):
            nobody.status()
        with Scheduler(url_of(server, secrets, "admin"), "test") as admin:
            assert admin.create(CONFIG)
        with Scheduler(url_of(server, secrets, "worker"), "test") as worker:
            assert worker.reserve("w0", 0, 1).reservations
        # The append-only file is read back with the rights of the user default, although nobody can be it.
        server.kill()
        server.start()
        with Scheduler(url_of(server, secrets, "board"), "test") as board:
            assert board.status().ledger.issued == 1
            assert board.verify() == []
            with pytest.raises(NotAllowed):
                board.reserve("w0", 0, 1)
        (secrets / "board").write_text("wrong")
        board = Scheduler(url_of(server, secrets, "board"), "test")
        with board, pytest.raises(ConfigError, match="roq-board") as error:
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
    server.redis.function_load(library.source(), replace=True)
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


def test_an_upgrade_under_a_live_run(server: Server, acting_as: As) -> None:
    """The library is replaced while claims are held; clients of one revision work side by side."""
    acting_as("admin").create(CONFIG, weights="w")
    old = acting_as("worker")
    claims = old.reserve("w0", 0, 2).reservations
    ours, newer = library.version(), f"{library.REVISION} 0123456789ab"
    server.redis.function_load(library.source().replace(f'"{ours}"', f'"{newer}"'), replace=True)
    assert old.complete(claims[0], trajectory()).status == "occupied"
    started_later = acting_as("worker")
    assert started_later.complete(claims[1], trajectory()).status == "occupied"
    assert server.redis.fcall_ro("roq_version", 0).decode() == newer, "no worker puts its own library back"
    acting_as("admin").status()
    assert server.redis.fcall_ro("roq_version", 0).decode() == ours, "who may load replaces another digest"
    assert acting_as("board").verify() == []
