"""``roq doctor`` on real servers: each thing that can be wrong is found, and told with what to do."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from roq import RunConfig, Scheduler, UnknownRun, load_job
from roq.admin import doctor
from roq.admin.doctor import Finding, examine
from roq.admin.doctor.files import weights
from roq.cli import main
from roq.job.stored import create_run
from roq.protocol import library
from roq.run.embedded_server import EmbeddedServer
from roq.types import WeightsRef
from roq.weights import weight_store
from tests.conftest import KINDS, Server
from tests.protocol.play import expire, trajectory
from tests.users import make_users, url_of

Job = Callable[..., Path]
CONFIG = RunConfig(eta=1, batch_size=2, prompts=50)


def found(url: str, run: str | None = None) -> dict[str, Finding]:
    findings = list(examine(url, run, None))
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def durable(server: Server) -> Any:
    """The server as it should be."""
    server.redis.config_set("appendonly", "yes")
    server.redis.config_set("appendfsync", "always")
    yield server
    server.redis.config_set("appendonly", "no")
    server.redis.config_set("maxmemory", 0)


def test_a_healthy_run(durable: Server, tmp_path: Path) -> None:
    with Scheduler(durable.url, "test") as sched:
        sched.create(CONFIG, weights="org/model")
        sched.renew("w0", 0, {"roq": doctor.package_version("roq")})
        sched.take("t0")
        lines = found(durable.url, "test")
    assert {line.state for line in lines.values()} == {"ok"}, lines
    assert lines["server"].text.startswith(f"{durable.kind} ")
    assert lines["library"].text == library.version()
    assert "default may call everything" in lines["user"].text
    assert "test at step 0, all invariants hold" in lines["run"].text
    assert "1 alive" in lines["workers"].text
    assert "t0, last seen" in lines["trainer"].text


def test_looking_changes_nothing(durable: Server) -> None:
    with Scheduler(durable.url, "test") as sched:
        sched.create(CONFIG)
        before = {key: durable.redis.dump(key) for key in durable.redis.scan_iter()}
        found(durable.url, "test")
        assert {key: durable.redis.dump(key) for key in durable.redis.scan_iter()} == before


def test_each_role_is_recognised(durable: Server, tmp_path: Path) -> None:
    make_users(durable, tmp_path)
    with Scheduler(url_of(durable, tmp_path, "admin"), "test") as sched:
        sched.create(CONFIG)
    for role in ("admin", "worker", "trainer", "operator", "board"):
        lines = found(url_of(durable, tmp_path, role), "test")
        assert lines["user"].text == f"roq-{role}, with the rights of role {role}"
        assert lines["run"].state == "ok"
        assert "appendfsync" in lines["persistence"].text, "nobody sees the configuration"
        assert not [line for line in lines.values() if line.state == "failed"]
    durable.redis.execute_command(
        "ACL", "SETUSER", "odd", "reset", "on", ">pw", "+ping", "+acl|whoami", "+fcall_ro|roq_version"
    )
    lines = found(f"{durable.url}?username=odd&password=pw", "test")
    assert "odd may call version" in lines["user"].text
    assert "not INFO" in lines["server"].text


def test_the_server_is_away_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REACH_S", 0.1)
    (line,) = found(f"unix://{tmp_path}/none.sock", "test").values()
    assert (line.name, line.state) == ("server", "failed")
    assert "start it, or correct the URL" in line.text


def test_what_is_wrong_with_a_server(server: Server) -> None:
    def line(name: str) -> Finding:
        return found(server.url)[name]

    client = server.redis
    assert line("persistence").state == "failed"
    assert "set appendonly yes" in line("persistence").text
    client.config_set("appendonly", "yes")
    client.config_set("appendfsync", "everysec")
    assert line("persistence").state == "warning"
    assert "set it to always" in line("persistence").text
    client.config_set("appendonly", "no")
    client.config_set("maxmemory-policy", "allkeys-lru")
    assert line("eviction").state == "failed"
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 1000)
    assert line("memory").state == "failed"
    assert "raise maxmemory" in line("memory").text
    client.config_set("maxmemory", 0)
    client.function_flush("SYNC")
    assert "not loaded" in line("library").text
    client.function_load(library.source().replace(f'"{library.version()}"', '"99 0123456789ab"'))
    assert (line("library").state, "upgrade roq here" in line("library").text) == ("failed", True)
    client.function_load(library.source().replace(f'"{library.version()}"', '"0 0123456789ab"'), replace=True)
    assert "0 0123456789ab" in line("library").text
    revision = library.version().split()[0]
    other = library.source().replace(f'"{library.version()}"', f'"{revision} 0123456789ab"')
    client.function_load(other, replace=True)
    assert "same revision" in line("library").text
    client.function_flush("SYNC")


ADMIN = "user root on nopass ~* &* +@all"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rights", "refused"),
    [
        ("off", "hdel, hset"),
        ("on nopass ~* &* +@all -@stream", "xadd"),
        ("on nopass ~other:* &* +@all", "hdel, hset"),
        ("off ~* &* +@all", None),
        ("off -@all (+@all ~roq:*)", None),
    ],
)
def test_what_the_user_default_may_not_a_restart_loses(
    kind: str, rights: str, refused: str | None, tmp_path: Path
) -> None:
    """The finding is held against what a restart does."""
    (tmp_path / "users.acl").write_text(f"user default {rights}\n{ADMIN}\n")
    durable = ["--appendonly", "yes", "--appendfsync", "always"]
    server = Server(kind, tmp_path, "--aclfile", str(tmp_path / "users.acl"), *durable)
    url = f"{server.url}?username=root&password=x"
    try:
        with Scheduler(url, "test") as sched:
            sched.create(CONFIG)
            assert sched.reserve("w0", 0, 1).reservations
            before = sched.status().ledger, [event.name for event in sched.events()]
        line = found(url, "test").get("restart")
        server.kill()
        server.start()
        with Scheduler(url, "test") as sched:
            try:
                lost = before != (sched.status().ledger, [event.name for event in sched.events()])
            except UnknownRun:
                lost = True
    finally:
        server.kill()
    if kind == "valkey":
        assert (line, lost) == (None, False)
        return
    assert line is not None
    assert (line.state, lost) == (("ok", False) if refused is None else ("failed", True)), line
    if refused is not None:
        assert refused in line.text
        assert "ACL SETUSER default ~* &* +@all" in line.text


def test_who_may_not_see_the_rights_of_default(durable: Server, tmp_path: Path) -> None:
    make_users(durable, tmp_path)
    with Scheduler(durable.url, "test") as sched:
        sched.create(CONFIG)
    assert "restart" not in found(url_of(durable, tmp_path, "operator"), "test"), "it cannot tell"
    durable.redis.execute_command("ACL", "SETUSER", "default", "-acl|dryrun")
    try:
        line = found(durable.url, "test").get("restart")
    finally:
        durable.redis.execute_command("ACL", "SETUSER", "default", "+@all")
    assert (line.state if line else None) == ("warning" if durable.kind == "redis" else None)


def test_what_is_wrong_with_a_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(name: str) -> Finding:
        return found(server.url, "test")[name]

    server.redis.function_flush("SYNC")
    assert (line("run").state, "library" in line("run").text) == ("warning", True)
    assert server.redis.function_list() == [], "it is not for a look to load one"
    server.redis.function_load(library.source())
    assert "roq init" in line("run").text
    with Scheduler(server.url, "test") as sched:
        sched.create(CONFIG, weights="w")
        assert "none alive" in line("workers").text
        assert "python -m roq_trainer" in line("trainer").text
        sched.renew("w0", 0, {"roq": "0.0.1", "error": "cannot load"})
        assert "w0 0.0.1" in line("workers").text
        sched.renew("w0", 0, {"error": "cannot load v3: no such file"})
        assert "cannot load v3" in line("workers").text
        locations = {
            "/nowhere/at/all": ("failed", "mount it"),
            str(tmp_path): ("failed", "has no weights"),
            "s3://bucket/3": ("warning", "no job"),
        }
        for version, (location, (state, said)) in enumerate(locations.items()):
            for claim in sched.reserve("w0", version, 4).reservations:
                sched.complete(claim, trajectory(claim.v_traj))
            assert sched.take("t0") is not None
            sched.publish(version + 1, location, "t0")
            assert line("weights").state == state
            assert said in line("weights").text
        sched.reserve("w0", 3, 1)
        monkeypatch.setattr(doctor, "SILENT_S", -1)
        assert (line("trainer").state, "t0, last seen" in line("trainer").text) == ("warning", True)
        sched.pause()
        assert "roq resume" in line("run").text
        sched.resume()
        expire(sched, "w0")
        assert "none alive" in line("workers").text
        server.redis.hdel("roq:{test}:slots", server.redis.hkeys("roq:{test}:slots")[0])
        assert (line("run").state, "invariants" in line("run").text) == ("failed", True)


def test_before_a_run(job: Job, folder: Path, durable: Server) -> None:
    """From a job file: the model, the folder, and whether the server has the memory."""
    file = job(redis__url=durable.url, protocol__batch_size=256, rollout__max_tokens=30_000)

    def call(*more: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(main, ["doctor", str(file), "--json", *more])
        assert "Traceback" not in done.output
        answer = msgspec.json.decode(done.stdout)
        assert answer["ok"] == (done.exit_code == 0)
        return done.exit_code, {line["name"]: line for line in answer["findings"]}

    durable.redis.function_load(library.source(), replace=True)
    code, lines = call()
    assert code == 0
    assert "roq init" in lines["run"]["text"]
    assert lines["model"]["state"] == lines["folder"]["state"] == "ok"
    assert "the run needs 1.17 GB" in lines["memory"]["text"], "256 x 2 x (2 + 6) of 277 kB"
    durable.redis.config_set("maxmemory", 100_000_000)
    assert "raise maxmemory, or set" in call()[1]["memory"]["text"]
    durable.redis.config_set("maxmemory", 0)
    (folder / "model" / "tokenizer.json").unlink()
    code, lines = call()
    assert (code, lines["model"]["state"]) == (1, "failed")
    text = CliRunner().invoke(main, ["doctor", str(file)])
    assert text.exit_code == 1
    assert "✗ model" in text.stdout
    assert "✓ persistence" in text.stdout
    other = CliRunner().invoke(main, ["doctor", str(file), "--redis", "unix:///none.sock", "--json"])
    assert other.exit_code == 1, "options outrank the file"


def test_an_object_store(job: Job, folder: Path, durable: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to, and the newest version looked at; by fsspec's own local store."""
    monkeypatch.setattr("roq.weights.remote.ATTEMPTS", 1)
    there = f"file://{folder}/objects"
    loaded = load_job(job(redis__url=durable.url, run__weights=there))
    with Scheduler(durable.url, "demo") as sched:
        create_run(sched, loaded)
        for claim in sched.reserve("w0", 0, 4).reservations:
            sched.complete(claim, trajectory())
        assert sched.take("t0") is not None
        store = weight_store(loaded.run)
        location = store.new(1)
        shutil.copytree(folder / "model", store.folder(location))
        store.put(location)
        sched.publish(1, location, "t0")
    lines = {line.name: line for line in examine(durable.url, "demo", loaded)}
    assert lines["store"].text == f"{there}: an object was written, read and deleted"
    assert (lines["weights"].state, lines["weights"].text) == ("ok", f"{location}, complete")
    (Path(location.removeprefix("file://")) / "model.safetensors").write_bytes(b"short")
    assert {line.name: line for line in examine(durable.url, "demo", None)}["weights"].state == "failed"
    shutil.rmtree(folder / "objects")
    (folder / "objects").write_text("in the way")
    lines = {line.name: line for line in examine(durable.url, "demo", loaded)}
    assert lines["store"].state == "failed"


def test_a_store_in_another_folder(job: Job, folder: Path, durable: Server) -> None:
    loaded = load_job(job(redis__url=durable.url, run__weights=str(folder / "shared" / "weights")))
    lines = {line.name: line for line in examine(durable.url, None, loaded)}
    assert lines["store"].state == "ok"
    assert not (folder / "shared").exists(), "looking makes no folders"
    (folder / "shared").write_text("in the way")
    lines = {line.name: line for line in examine(durable.url, None, loaded)}
    assert lines["store"].state == "failed"


def test_a_run_with_its_own_server(job: Job, folder: Path) -> None:
    file = job()
    done = CliRunner().invoke(main, ["doctor", str(file)])
    assert done.exit_code == 0, done.output
    assert "! server       not started yet" in done.stdout
    server = EmbeddedServer(folder / "run")
    server.start()
    server.stop()
    done = CliRunner().invoke(main, ["doctor", str(file)])
    assert done.exit_code == 0, done.output
    assert "✓ persistence  append-only file, synced with every write" in done.stdout
    assert not server.alive, "woken for the look alone"
    shutil.rmtree(folder / "run")


def test_bad_arguments() -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert (done.exit_code, "--redis" in done.stderr) == (2, True)


@contextmanager
def answering() -> Iterator[str]:
    """A sender's address, where somebody answers each line with one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        asked = json.loads(connection.makefile().readline())
                        if asked == {"type": "hello", "secret": "s3cret", "ranks": 0}:
                            connection.sendall(b"{}\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}/s3cret"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_weights_that_are_sent(tmp_path: Path, job: Job) -> None:
    loaded = load_job(job(run__transfer="gloo"))
    here, there = tmp_path / "v00000001-0a1b2c3d", "/nowhere/v00000001-0a1b2c3d"
    here.mkdir()
    save_file({"a": np.zeros(4, np.float32)}, here / "model.safetensors")

    def told(location: Path | str, sender: str, *, ended: bool = False) -> tuple[str, str]:
        finding = weights(WeightsRef(version=1, location=str(location), sender=sender), loaded, ended=ended)
        assert "s3cret" not in finding.text
        return finding.state, finding.text

    with answering() as sender:
        state, text = told(here, sender)
        assert (state, "sends them" in text) == ("ok", True)
        state, text = told(there, sender)
        assert (state, sender.partition("/")[0] in text) == ("ok", True)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as hung:  # it accepts, and says nothing
        state, text = told(here, f"127.0.0.1:{hung.getsockname()[1]}/s3cret")
        assert (state, "ROQ_TRAINER_ADDRESS" in text) == ("warning", True)
    assert told(there, "127.0.0.1:1/s3cret")[0] == "failed"
    state, text = told(here, "")
    assert (state, "not sending" in text) == ("warning", True)
    assert told(there, "")[0] == "failed"
    assert told(here, "127.0.0.1:1/s3cret", ended=True)[0] == "ok"
