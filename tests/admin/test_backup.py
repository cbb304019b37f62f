"""A run exported from one server and imported into another goes on there."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from roq import (
    ConfigError,
    ConfigMismatch,
    NotAllowed,
    RoqError,
    RunConfig,
    Scheduler,
    UnknownRun,
    UnsuitableServer,
)
from roq.admin import backup, backup_file
from roq.admin.backup import export_run, import_run, read_header
from roq.admin.importable import STATE
from roq.cli import main
from roq.protocol import library
from roq.protocol.keys import KINDS, keys_of
from roq.text import printable
from tests.admin.dice import DICE, Dice
from tests.conftest import Server
from tests.protocol.play import expire, trajectory
from tests.users import make_users, url_of

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
        one.empty()
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
        add, version, tries = backup_file.Writer.add, 1, 0

        def add_and_train(writer: Any, frame: Any) -> None:
            nonlocal version, tries
            add(writer, frame)
            if isinstance(frame, backup_file.Header):
                tries += 1
                if tries < 3:
                    step(version)
                    version += 1

        monkeypatch.setattr(backup_file.Writer, "add", add_and_train)
        done = export_run(server.url, "test", tmp_path / "run.roq")
        assert (tries, done.version) == (3, version)
        monkeypatch.setattr(backup, "_TRIES", 2)
        tries = -99
        with pytest.raises(RoqError, match=r"\b2\b.*\brun test\b"):
            export_run(server.url, "test", tmp_path / "again.roq")
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [tmp_path / "run.roq"]
    server.empty()
    import_run(server.url, tmp_path / "run.roq")
    with Scheduler(server.url, "test") as sched:
        assert sched.verify() == []
        assert sched.audit().problems == []


def test_a_run_that_is_there_is_never_touched(run: tuple[Server, Path]) -> None:
    server, file = run
    before = content(server)
    with pytest.raises(ConfigMismatch, match="'test'"):
        import_run(server.url, file)
    assert content(server) == before
    server.redis.delete(*(keys_of("test")[name] for name in KINDS if name != "dead"))
    server.redis.hset(keys_of("test")["dead"], "1", "left over")
    with pytest.raises(ConfigMismatch):
        import_run(server.url, file)
    assert server.redis.dbsize() == 1


def test_a_run_that_is_created_meanwhile(run: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, file = run
    server.empty()
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
    server.empty()
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        import_run(server.url, file)
    assert server.redis.dbsize() == 0


def test_a_file_that_was_changed(run: tuple[Server, Path]) -> None:
    server, file = run
    data = bytearray(file.read_bytes())
    server.empty()
    for place in range(10, len(data), max(1, len(data) // 40)):
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=re.escape(str(file))):
            import_run(server.url, file)
        data[place] ^= 1
    file.write_bytes(bytes(data) + struct.pack(">Q", 1) + b"x")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        import_run(server.url, file)
    assert server.redis.dbsize() == 0


@pytest.mark.parametrize(
    "data", [b"", b"x", b"not an export at all, but some text", bytes(100), b"\xff" * 100]
)
def test_files_of_other_kinds(server: Server, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    for path in (tmp_path / "file", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            import_run(server.url, path)
    assert server.redis.dbsize() == 0


def test_a_file_of_a_newer_roq(run: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, file = run
    monkeypatch.setattr(library, "version", lambda: "99 0123456789ab")
    server.empty()
    with monkeypatch.context() as newer:
        newer.setattr(library, "REVISION", 99)
        header = msgspec.structs.replace(read_header(file), library="99 0123456789ab")
    monkeypatch.undo()
    body = msgspec.msgpack.encode(header)
    file.write_bytes(struct.pack(">Q", len(body)) + body)
    with pytest.raises(ConfigError, match="99 0123456789ab"):
        import_run(server.url, file)


def test_a_server_without_room(run: tuple[Server, Path]) -> None:
    server, file = run
    server.empty()
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
    assert (again.exit_code, "exists" in again.stderr) == (2, True)
    nowhere = call("export", *where, "--run", "test", "--out", str(tmp_path / "no" / "file"))
    assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (2, True)
    other = call("export", *where, "--run", "other", "--out", str(tmp_path / "other"))
    assert (other.exit_code, "there is no run 'other'" in other.stderr) == (2, True)
    there = call("import", str(file), *where, "--yes")
    assert (there.exit_code, "exists on this server" in there.stderr) == (2, True)
    server.empty()
    back = call("import", str(file), *where, "--json", "--yes")
    assert back.exit_code == 0, back.output
    assert msgspec.json.decode(back.stdout)["run"] == "test"
    assert list(tmp_path.iterdir()) == [file]


def test_an_import_shows_what_it_would_run_and_needs_a_yes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's digest detects damage, not its author: an edited one names the author's functions."""
    ours = {
        "reward.function": '"os:system"',
        "run.dir": '"/home/victim/.ssh"',
        "rollout.engine": '{"trust_remote_code":true}',
        "run.weights": '"\\u001b]0;x\x07"\x1b[2J\n',
    }
    with Scheduler(server.url, "foreign") as sched:
        sched.create(RunConfig(eta=1, batch_size=2), settings={**ours, "model.path": '"/m"'}, weights="w")
    file = tmp_path / "foreign.roq"
    export_run(server.url, "foreign", file)
    server.empty()

    def call(*more: str, typed: str = "") -> Result:
        return CliRunner().invoke(main, ["import", str(file), "--redis", server.url, *more], input=typed)

    refused = call(typed="y\n")  # no terminal
    assert refused.exit_code == 2
    for name, value in ours.items():
        assert f"  {name} = {printable(value)}" in refused.stderr
    assert not server.redis.keys("*foreign*")
    monkeypatch.setattr("roq.cli.admin.on_terminal", lambda: True)
    assert call(typed="n\n").exit_code == 2
    assert not server.redis.keys("*foreign*")
    assert call(typed="y\n").exit_code == 0
    with Scheduler(server.url, "foreign") as sched:
        assert sched.settings()["reward.function"] == ours["reward.function"]


def test_no_run(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UnknownRun):
        export_run(server.url, "test", tmp_path / "run.roq")
    assert not list(tmp_path.iterdir())


# ---- files that somebody made -------------------------------------------------------------------


def framed(*frames: Any) -> bytes:
    data = b""
    for frame in frames:
        body = frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame)
        data += struct.pack(">Q", len(body)) + body
    return data


def whole(*frames: Any) -> bytes:
    data = framed(*frames)
    return data + framed(backup_file.End(hashlib.sha256(data).hexdigest()))


def nested(depth: int) -> bytes:
    start = msgspec.msgpack.encode({"type": "part", "key": "config", "items": None})[:-1]
    return start + b"\x91" * depth + b"\xc0"


HEADER = backup_file.Header(roq_export=1, run="made", library="1 0123456789ab", version=0, at=0.0)
BAD_PARTS: list[tuple[str, list[Any]]] = [
    ("slots", [1, 2]),
    ("slots", [[b"a"]]),
    ("slots", [[b"a", [b"b"]]]),
    ("slots", [[b"x", b"y"]]),
    ("slots", [[b"9.9", b"reserved 1"]]),
    ("slots", []),
    ("groups", [[b"1", b"[" * 100_000]]),
    ("groups", [[b"9" * 5000, b"{}"]]),
    ("groups", [[b"1", b"{}"]]),
    ("claims", [[b"a", "x"]]),
    ("claims", [[b"a", float("nan")]]),
    ("claims", [[b"a", 1.0]]),
    ("requeued", [[1]]),
    ("requeued", [None]),
    ("requeued", [b"x"]),
    ("events", [[b"0-0", [b"a", b"b"]]]),
    ("events", [[b"5-0", [b"a", b"b"]], [b"4-0", [b"a", b"b"]]]),
    ("events", [[b"1-0", [b"a", b"b"]]]),  # not above those of the file
    ("events", [[b"5-0", [b"a"]]]),
    ("events", [[b"5-0", []]]),
    ("events", [7]),
    ("config", [[b"eta", b"-1"]]),
    ("config", [[b"surprise", b"1"]]),
    ("config", [[b"batch_size", b"nan"]]),
    ("state", [[b"version", b"999999999999999"]]),
    ("state", [[b"checkpoint", b"-999999999999999"]]),
    ("state", [[b"frontier", b"x"]]),
    ("state", [[b"next_group", b""]]),
    ("nothing", [[b"a", b"b"]]),
]


@pytest.fixture
def frames(server: Server, tmp_path: Path) -> list[Any]:
    """The frames of a file that can be imported."""
    some_run(server, 30)
    export_run(server.url, "test", tmp_path / "good.roq")
    server.empty()
    parts = list(backup_file.parts(tmp_path / "good.roq"))
    return [read_header(tmp_path / "good.roq"), *parts]


def test_parts_that_no_run_has(server: Server, frames: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "made.roq"
    for key, items in BAD_PARTS:
        file.write_bytes(whole(*frames, backup_file.Part(key, items)))
        with pytest.raises(ConfigError, match=r"made\.roq"):
            import_run(server.url, file)
        assert server.redis.dbsize() == 0, (key, items)
    for key in ("config", "state", "groups", "slots"):
        file.write_bytes(whole(*(part for part in frames if getattr(part, "key", "") != key)))
        with pytest.raises(ConfigError, match=r"made\.roq"):
            import_run(server.url, file)
        assert server.redis.dbsize() == 0, key
    needed = {"config": ("eta", "lease_ms", "max_attempts", "event_log"), "state": STATE}
    for key, fields in needed.items():
        (part,) = (part for part in frames if getattr(part, "key", "") == key)
        for field in fields:
            less = backup_file.Part(key, [item for item in part.items if item[0] != field.encode()])
            file.write_bytes(whole(*(less if frame is part else frame for frame in frames)))
            with pytest.raises(ConfigError, match=rf"made\.roq.*{field}"):
                import_run(server.url, file)
    assert server.redis.dbsize() == 0
    file.write_bytes(whole(*frames))
    import_run(server.url, file)


@pytest.mark.parametrize(
    "data",
    [
        framed(HEADER) + struct.pack(">Q", 1 << 35),
        framed(HEADER) + struct.pack(">Q", 1 << 63),
        struct.pack(">Q", 1 << 35) + framed(HEADER)[8:],
        whole(HEADER, nested(100_000)),
        whole(HEADER, b"\x83\xa4type\xa4part\xa3key\xa6config\xa5items" + b"\xdd\xff\xff\xff\xff" * 6),
        whole(nested(4_000)),
        *(
            whole(msgspec.structs.replace(HEADER, library=library))
            for library in ("", "1", "99 x", "\0", "-1 z", "x 0123456789ab", "9" * 3000)
        ),
        *(whole(msgspec.structs.replace(HEADER, run=run)) for run in ("", "a}b", "../x", "x" * 65, "a\n")),
    ],
)
def test_frames_that_no_export_has(server: Server, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "made.roq").write_bytes(data)
    with pytest.raises(ConfigError, match=r"made\.roq"):
        import_run(server.url, tmp_path / "made.roq")
    assert server.redis.dbsize() == 0


def test_a_path_that_cannot_be(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(str(tmp_path / "a\0b")))):
        import_run(server.url, tmp_path / "a\0b")
