"""Whether a server is fit for a run."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from roq import AsyncScheduler, NotAllowed, RunConfig, Scheduler
from roq.admin.doctor import examine
from roq.admin.server import check_server, wait_for_server
from roq.client.failures import translate
from roq.errors import ConfigError, UnsuitableServer
from tests.conftest import KINDS, Server
from tests.ports import free_ports


def test_a_user_that_may_not_ask(server: Server) -> None:
    server.redis.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">pw", "~*", "+@all", "-info")
    url = f"{server.url}?username=deaf&password=pw"
    with pytest.raises(NotAllowed, match="INFO"):
        check_server(url)
    with pytest.raises(NotAllowed), Scheduler(url, "test") as sched:
        sched.create(RunConfig(eta=1, batch_size=2))


def test_an_evicting_server_is_refused(url: str) -> None:
    with redis.Redis.from_url(url) as c:
        c.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsuitableServer, match=r"maxmemory-policy.*allkeys-lru"):
        check_server(url)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("appendonly", "no", "no append-only file"), ("appendfsync", "everysec", "appendfsync everysec")],
)
def test_weak_durability_is_a_warning(url: str, name: str, value: str, said: str) -> None:
    with redis.Redis.from_url(url) as c:
        c.config_set(name, value)
    (warning,) = check_server(url)
    assert said in warning


def test_a_server_that_hides_its_settings(url: str) -> None:
    with redis.Redis.from_url(url) as c:
        c.acl_setuser("tenant", enabled=True, passwords=["+pw"], commands=["+@all", "-config"], keys=["*"])
    hidden = url.replace("unix://", "unix://tenant:pw@")
    (warning,) = check_server(hidden)
    assert "appendfsync" in warning
    assert "pw" not in warning


def test_a_wrong_password_is_bad_input(url: str) -> None:
    with pytest.raises(ConfigError, match=r"x:\*\*\*@"):
        wait_for_server(url.replace("unix://", "unix://x:secret@"), 5)


def test_an_old_server_is_refused() -> None:
    """No Redis 6 is at hand: this answers INFO as one does."""
    about = b"redis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
    with stand_in({b"INFO": about}) as url, pytest.raises(UnsuitableServer, match=r"6\.2\.14.*7\.0"):
        check_server(url)


@contextmanager
def stand_in(texts: dict[bytes, bytes], refused: tuple[bytes, bytes] = (b"", b"")) -> Iterator[str]:
    """A server that answers these commands with text, refuses one, and says OK to others: its URL."""

    class Stand(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while header := self.rfile.readline():
                words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2) for _ in range(int(header[1:]))]
                name = words[0].strip().upper()
                if name == refused[0]:
                    self.wfile.write(b"-ERR %s\r\n" % refused[1])
                elif name in texts:
                    self.wfile.write(b"$%d\r\n%s\r\n" % (len(texts[name]), texts[name]))
                elif name == b"HELLO":
                    self.wfile.write(b"%1\r\n+proto\r\n:3\r\n")
                else:
                    self.wfile.write(b"%0\r\n" if name == b"CONFIG" else b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stand) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


async def everyone_refuses(url: str) -> None:
    """No process waits for the server, and doctor fails."""
    with pytest.raises(UnsuitableServer), Scheduler(url, "test", retry_s=None) as sched:
        sched.create(RunConfig(eta=1, batch_size=2))
    with pytest.raises(UnsuitableServer):
        async with AsyncScheduler(url, "test", retry_s=None) as sched:
            await sched.create(RunConfig(eta=1, batch_size=2))
    (line,) = examine(url, None, None)
    assert (line.name, line.state) == ("server", "failed")


@pytest.mark.parametrize("name", ["INFO", "FCALL", "FCALL_RO", "FUNCTION"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_a_command(kind: str, name: str, tmp_path: Path) -> None:
    server = Server(kind, tmp_path, "--rename-command", name, "")
    try:
        await everyone_refuses(server.url)
        if name == "INFO":
            with pytest.raises(UnsuitableServer):
                check_server(server.url)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        (b"HELLO", b"unknown command `HELLO`, with args beginning with: `3`, "),
        (b"HELLO", b"unsupported command 'hello'"),
        (b"INFO", b"Command is not available: 'INFO'"),
    ],
)
async def test_a_proxy_without_a_command(name: bytes, reply: bytes) -> None:
    with stand_in({}, (name, reply)) as url:
        await everyone_refuses(url)
        if name == b"HELLO":
            with pytest.raises(UnsuitableServer):
                wait_for_server(url, 60)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_is_no_cluster(kind: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = Server(kind, tmp_path, "--port", str(port))
    try:
        await everyone_refuses(f"redis+cluster://127.0.0.1:{port}")
    finally:
        server.kill()


def test_a_node_of_a_cluster() -> None:
    assert isinstance(translate(redis.exceptions.MovedError("9 127.0.0.1:1"), "redis://h"), ConfigError)
