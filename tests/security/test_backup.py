"""A run exported from one server and imported into another goes on there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from roq import (
    ConfigError,
    ConfigMismatch,
    NotAllowed,
    RoqError,
    RunConfig,
    Scheduler,
    UnknownRun,
    UnsuitableServer,
    _library,
    backup,
)
from roq._keys import KINDS, keys_of
from roq.backup import export_run, import_run, read_header
from roq.cli import main
from tests.conftest import Server
from tests.protocol.play import expire, trajectory
from tests.security.conftest import make_users, url_of
from tests.security.dice import DICE, Dice

Get = Callable[[str], Server]


def content(server: Server, run: str = "test") -> dict[str, Any]:
    """All that the run's keys hold."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        command, *rest = backup._READ[kind]
        found[name] = server.redis.execute_command(command, keys_of(run)[name], *rest)
    return found


def some_run(server: Server, turns: int = 600) -> Dice:
    with Scheduler(server.url, "test") as sched:
        sched.create(DICE, settings={"a.b": "c"}, weights="w0")
        dice = Dice(sched, sched, sched, server)
        for _ in range(turns):
            dice.turn()
    return dice


@pytest.fixture
def run(server: Server, tmp_path: Path) -> tuple[Server, Path]:
    """A run in the middle of its life, and the file it was exported to."""
    some_run(server, 300)
    export_run(server.url, "test", tmp_path / "run.roq")
    return server, tmp_path / "run.roq"


@pytest.mark.parametrize(("old", "new"), [("redis", "valkey"), ("valkey", "redis")])
def test_a_run_moves_in_the_middle(old: str, new: str, servers: Get, tmp_path: Path) -> None:
    """Its workers hold claims, its trainer a batch; they go on with the other server, to the end."""
    source, target = servers(old), servers(new)
    for one in (source, target):
        one.redis.flushall()
    dice = some_run(source)
    before = content(source)
    now_and_then = {"requeued", "dead", "cancelled", "departed", "pending"}
    while not dice.taken or not all(before[name] for name in KINDS if name not in now_and_then):
        assert dice.turns < 2_000
        dice.turn()
        before = content(source)
    done = export_run(source.url, "test", tmp_path / "run.roq")
    assert content(source) == before, "an export changes nothing"
    assert done == import_run(target.url, tmp_path / "run.roq")
    assert content(target) == before
    assert target.redis.dbsize() == sum(bool(content) for content in before.values())
    with Scheduler(target.url, "test") as sched:
        dice.move(sched, sched, sched, target)
        assert sched.verify() == []
        while not sched.status().ended:
            assert dice.turns < 20_000
            dice.turn()
        assert sched.verify() == []
        audit = sched.audit()
    assert audit.problems == []
    assert audit.issued == sched_issued(target)


def sched_issued(server: Server) -> int:
    return int(server.redis.hget(keys_of("test")["state"], "next_ordinal"))


def test_while_the_run_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves while it is read is noticed: all is read again, and the file is of one moment."""
    with Scheduler(server.url, "test") as sched:
        sched.create(RunConfig(eta=1, batch_size=2, prompts=100), weights="w")

        def step(version: int) -> None:
            for claim in sched.reserve("w0", version, 4).reservations:
                sched.complete(claim, trajectory(claim.v_traj))
            assert sched.take("t0") is not None
            sched.publish(version + 1, "w", "t0")
            sched.checkpointed(version + 1, "t0")

        step(0)
        add, version, tries = backup._Writer.add, 1, 0

        def add_and_train(writer: Any, frame: Any) -> None:
            nonlocal version, tries
            add(writer, frame)
            if isinstance(frame, backup.Header):
                tries += 1
                if tries < 3:
                    step(version)
                    version += 1

        monkeypatch.setattr(backup._Writer, "add", add_and_train)
        done = export_run(server.url, "test", tmp_path / "run.roq")
        assert (tries, done.version) == (3, version)
        monkeypatch.setattr(backup, "_TRIES", 2)
        tries = -99
        with pytest.raises(RoqError, match="pause the run"):
            export_run(server.url, "test", tmp_path / "again.roq")
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [tmp_path / "run.roq"]
    server.redis.flushall()
    import_run(server.url, tmp_path / "run.roq")
    with Scheduler(server.url, "test") as sched:
        assert sched.verify() == []
        assert sched.audit().problems == []


def test_a_run_that_is_there_is_never_touched(run: tuple[Server, Path]) -> None:
    server, file = run
    before = content(server)
    with pytest.raises(ConfigMismatch, match="never changes a run that is there"):
        import_run(server.url, file)
    assert content(server) == before
    server.redis.delete(*(keys_of("test")[name] for name in KINDS if name != "dead"))
    server.redis.hset(keys_of("test")["dead"], "1", "left over")
    with pytest.raises(ConfigMismatch):
        import_run(server.url, file)
    assert server.redis.dbsize() == 1


def test_a_run_that_is_created_meanwhile(run: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, file = run
    server.redis.flushall()
    write = backup._write

    def write_late(*arguments: Any) -> None:
        write(*arguments)
        with Scheduler(server.url, "test") as other:
            other.create(RunConfig(eta=0, batch_size=1))

    monkeypatch.setattr(backup, "_write", write_late)
    with pytest.raises(ConfigMismatch):
        import_run(server.url, file)
    with Scheduler(server.url, "test") as other:
        assert other.config().eta == 0
        assert other.status().version == 0
    assert not list(server.redis.scan_iter("*import*"))


@pytest.mark.parametrize("at", range(0, 101, 10))
def test_a_file_that_broke_off(run: tuple[Server, Path], at: int) -> None:
    server, file = run
    data = file.read_bytes()
    file.write_bytes(data[: max(0, len(data) * at // 100 - 1)])
    server.redis.flushall()
    with pytest.raises(ConfigError, match=r"broke off or was changed|is no export of a run"):
        import_run(server.url, file)
    assert server.redis.dbsize() == 0


def test_a_file_that_was_changed(run: tuple[Server, Path]) -> None:
    server, file = run
    data = bytearray(file.read_bytes())
    server.redis.flushall()
    for place in range(10, len(data), max(1, len(data) // 40)):
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(ConfigError):
            import_run(server.url, file)
        data[place] ^= 1
    file.write_bytes(bytes(data) + struct.pack(">Q", 1) + b"x")
    with pytest.raises(ConfigError, match="broke off or was changed"):
        import_run(server.url, file)
    assert server.redis.dbsize() == 0


@pytest.mark.parametrize(
    "data", [b"", b"x", b"not an export at all, but some text", bytes(100), b"\xff" * 100]
)
def test_files_of_other_kinds(server: Server, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    for path in (tmp_path / "file", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"is no export of a run|cannot be read"):
            import_run(server.url, path)
    assert server.redis.dbsize() == 0


def test_a_file_of_a_newer_roq(run: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, file = run
    monkeypatch.setattr(_library, "version", lambda: "99 0123456789ab")
    server.redis.flushall()
    with monkeypatch.context() as newer:
        newer.setattr(_library, "REVISION", 99)
        header = msgspec.structs.replace(read_header(file), library="99 0123456789ab")
    monkeypatch.undo()
    body = msgspec.msgpack.encode(header)
    file.write_bytes(struct.pack(">Q", len(body)) + body)
    with pytest.raises(ConfigError, match="newer roq"):
        import_run(server.url, file)


def test_a_server_without_room(run: tuple[Server, Path]) -> None:
    server, file = run
    server.redis.flushall()
    with Scheduler(server.url, "big") as sched:
        sched.create(RunConfig(eta=0, batch_size=1))
        expire(sched)
    room = int(server.redis.info("memory")["used_memory"]) + 60_000
    server.redis.config_set("maxmemory", room)
    try:
        with pytest.raises((UnsuitableServer, RoqError), match="memory"):
            import_run(server.url, file)
    finally:
        server.redis.config_set("maxmemory", 0)
    assert not server.redis.keys("roq:{test}:*")


def test_under_the_role_admin(server: Server, tmp_path: Path) -> None:
    make_users(server, tmp_path)
    some_run(server, 100)
    with pytest.raises(NotAllowed):
        export_run(url_of(server, tmp_path, "board"), "test", tmp_path / "run.roq")
    admin = url_of(server, tmp_path, "admin")
    export_run(admin, "test", tmp_path / "run.roq")
    before = content(server)
    server.redis.delete(*keys_of("test").values())
    with pytest.raises(NotAllowed):
        import_run(url_of(server, tmp_path, "operator"), tmp_path / "run.roq")
    import_run(admin, tmp_path / "run.roq")
    assert content(server) == before


def test_the_commands(server: Server, tmp_path: Path) -> None:
    some_run(server, 60)
    file = tmp_path / "run.roq"
    where = ("--redis", server.url)

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(main, arguments)

    done = call("export", *where, "--run", "test", "--out", str(file))
    assert done.exit_code == 0, done.output
    assert f"exported to {file}" in done.stdout
    assert file.stat().st_mode & 0o777 == 0o600
    again = call("export", *where, "--run", "test", "--out", str(file))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    nowhere = call("export", *where, "--run", "test", "--out", str(tmp_path / "no" / "file"))
    assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (2, True)
    other = call("export", *where, "--run", "other", "--out", str(tmp_path / "other"))
    assert (other.exit_code, "there is no run 'other'" in other.stderr) == (2, True)
    there = call("import", str(file), *where)
    assert (there.exit_code, "exists on this server" in there.stderr) == (2, True)
    server.redis.flushall()
    back = call("import", str(file), *where, "--json")
    assert back.exit_code == 0, back.output
    assert msgspec.json.decode(back.stdout)["run"] == "test"
    assert list(tmp_path.iterdir()) == [file]


def test_no_run(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UnknownRun):
        export_run(server.url, "test", tmp_path / "run.roq")
    assert not list(tmp_path.iterdir())
