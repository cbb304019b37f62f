"""Whether a server is fit for a run."""

from __future__ import annotations

import socketserver
import threading

import pytest
import redis

from roq import NotAllowed, RunConfig, Scheduler
from roq.admin.server import check_server, wait_for_server
from roq.errors import ConfigError, UnsuitableServer
from tests.conftest import Server


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
    with pytest.raises(ConfigError):
        wait_for_server(url.replace("unix://", "unix://x:secret@"), 5)


def test_an_old_server_is_refused() -> None:
    """No Redis 6 is at hand: this answers INFO as one does."""

    class Old(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while header := self.rfile.readline():
                words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2) for _ in range(int(header[1:]))]
                if words[0].strip().upper() == b"INFO":
                    text = b"redis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
                    self.wfile.write(b"$%d\r\n%s\r\n" % (len(text), text))
                elif words[0].strip().upper() == b"HELLO":
                    self.wfile.write(b"-ERR unknown command\r\n")
                else:
                    self.wfile.write(b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Old) as old:
        old.daemon_threads = True
        threading.Thread(target=old.serve_forever, daemon=True).start()
        with pytest.raises(UnsuitableServer, match=r"6\.2\.14.*7\.0"):
            check_server(f"redis://127.0.0.1:{old.server_address[1]}?protocol=2")
        old.shutdown()
