"""TLS, passwords from files, and no password in anything that is printed."""

from __future__ import annotations

import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

from roq import (
    AsyncScheduler,
    ConfigError,
    RoqError,
    RunConfig,
    Scheduler,
    ServerUnavailable,
    UnsuitableServer,
)
from roq.admin.server import check_server, wait_for_server
from roq.cli import main
from roq.client.connect import check_url, connect, masked, own_address
from tests.conftest import Server, server_binary
from tests.ports import free_ports
from tests.protocol.play import trajectory

PASSWORD = "open-sesame"
CONFIG = RunConfig(eta=1, batch_size=1)


class Tls:
    """A Redis that speaks TLS only, asks for a certificate and a password; and files for a client."""

    def __init__(self, folder: Path) -> None:
        binary = server_binary("redis")
        if binary is None:
            message = "no redis-server on this machine; Debian's speaks TLS"
            if os.environ.get("ROQ_CI"):
                pytest.fail(message)
            pytest.skip(message)
        self.folder = folder
        (self.port,) = free_ports(1)
        ca, stranger = trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        stranger.cert_pem.write_to_path(folder / "stranger-ca.pem")
        for name, cert in (
            ("server", ca.issue_cert("localhost")),
            ("client", ca.issue_cert("worker")),
            ("stranger", stranger.issue_cert("worker")),
        ):
            cert.private_key_pem.write_to_path(folder / f"{name}.key")
            cert.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        (folder / "password").write_text(f"{PASSWORD}\n")
        (folder / "wrong").write_text("no-sesame")
        options = {
            "port": 0,
            "tls-port": self.port,
            "tls-cert-file": folder / "server.pem",
            "tls-key-file": folder / "server.key",
            "tls-ca-cert-file": folder / "ca.pem",
            "tls-auth-clients": "yes",
            "requirepass": PASSWORD,
            "dir": folder,
            "save": "",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen([binary, *words], stdout=subprocess.DEVNULL)
        wait_for_server(self.url(), 10)

    def url(self, *, host: str = "localhost", ca: str = "ca", who: str | None = "client", **more: str) -> str:
        files = {"ssl_ca_certs": self.folder / f"{ca}.pem", "password_file": self.folder / "password"}
        if who:
            files |= {"ssl_certfile": self.folder / f"{who}.pem", "ssl_keyfile": self.folder / f"{who}.key"}
        query = "&".join(f"{name}={value}" for name, value in {**files, **more}.items())
        return f"rediss://{host}:{self.port}?{query}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    server = Tls(tmp_path_factory.mktemp("tls"))
    yield server
    server.process.kill()
    server.process.wait(10)


async def test_tls_with_files(tls: Tls) -> None:
    with Scheduler(tls.url(), "sync") as sched:
        assert sched.create(CONFIG)
    async with AsyncScheduler(tls.url(), "async") as sched:
        assert await sched.create(CONFIG)
    assert any("append-only" in warning for warning in check_server(tls.url()))
    with Scheduler(tls.url(host="127.0.0.1", ssl_check_hostname="false"), "sync") as sched:
        assert sched.verify() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ca": "stranger-ca"}, "not trusted.*ssl_ca_certs"),
        ({"who": None}, "ssl_certfile and ssl_keyfile"),
        ({"who": "stranger"}, "does not trust.*ssl_certfile"),
        ({"host": "127.0.0.1"}, "not trusted.*ssl_ca_certs"),
    ],
)
async def test_what_tls_refuses_is_told_at_once(tls: Tls, change: dict[str, str | None], said: str) -> None:
    url, began = tls.url(**change), time.monotonic()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said), Scheduler(url, "sync", retry_s=None) as sched:
        sched.status()
    with pytest.raises(ConfigError, match=said):
        async with AsyncScheduler(url, "sync", retry_s=None) as sched:
            await sched.status()
    with pytest.raises(ConfigError, match=said):
        wait_for_server(url, 60)
    # not at once: an end of the connection may overtake the server's word about a certificate
    assert time.monotonic() - began < 30


class Http(socketserver.StreamRequestHandler):
    """Answers as a web server does to what it does not understand."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def web_port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Http) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        yield web.server_address[1]
        web.shutdown()
        thread.join(10)


async def test_a_web_server_behind_the_url(web_port: int) -> None:
    url = f"redis://127.0.0.1:{web_port}"
    for ask in (lambda: wait_for_server(url, 10), lambda: check_server(url)):
        with pytest.raises(UnsuitableServer, match=str(web_port)):
            ask()
    with pytest.raises(RoqError, match="failed"), Scheduler(url, "x", retry_s=None) as sched:
        sched.status()
    with pytest.raises(RoqError, match="failed"):
        async with AsyncScheduler(url, "x", retry_s=None) as sched:
            await sched.status()


def test_no_tls_to_a_port_with(tls: Tls) -> None:
    with pytest.raises(ServerUnavailable):
        wait_for_server(f"redis://:{PASSWORD}@localhost:{tls.port}", 0.1)


def test_a_wrong_password(tls: Tls) -> None:
    url = tls.url(password_file=str(tls.folder / "wrong"))
    for attempt in (lambda: wait_for_server(url, 10), Scheduler(url, "sync", retry_s=None).status):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert "refuse" in str(error.value)
        assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h?password_file=/none", "password_file = '/none'"),
        ("redis+cluster://h?password_file={}/empty", "empty is empty"),
        ("redis+sentinel://h/s?sentinel_password_file={}/binary", "cannot be read: it is not text"),
        ("redis://h?ssl_ca_certs={}/empty", "ssl_ca_certs needs TLS"),
        ("rediss://h?ssl_ca_certs={}/empty", "ssl_ca_certs = '.*empty'"),
        ("rediss://h?ssl_certfile={}/binary", "ssl_certfile = '.*binary'"),
        ("rediss://h?ssl_check_hostname=perhaps", "ssl_check_hostname must"),
        ("redis+sentinel://h/s?colour=red", "'colour'.* username, "),
        ("redis://h?colour=red", "colour"),
        ("redis://h?protocol=2", "sets protocol itself"),
        ("redis://h?legacy_responses=true", "sets legacy_responses itself"),
        ("redis://h?encoding=latin-1", "sets encoding itself"),
        ("redis://h?max_connections=3", "sets max_connections itself"),
        ("redis://h?retry_on_timeout=true", "sets retry_on_timeout itself"),
        ("redis://h?socket_timeout=2.4", "at least 2.5"),
        ("redis://h?socket_timeout=nan", "at least 2.5"),
        ("redis://h?socket_timeout=soon", "at least 2.5"),
        ("redis://:pa/ss@h", "percent-encode"),
        ("redis://:p[ss@h", "percent-encode"),
        ("redis://:pass@h:port", "percent-encode"),
        ("redis+cluster://:pass@h:port", "must be numbers"),
        ("redis://h\0ost", "a NUL character"),
        ("unix:///tmp/a%00b", "a NUL character"),
        ("http://h", "scheme"),
        ("", "scheme"),
    ],
)
def test_urls_that_cannot_be(url: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=said) as error:
        check_url(url.replace("{}", str(tmp_path)))
    assert "ss@" not in str(error.value)
    assert "'pa'" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:sesame@host:6379/0",
        "redis://:sesame@host",
        "redis://me:ses/ame@host",
        "redis://me:s[esame@host",
        "redis://me:s@esame@host:x",
        "redis://me:sesa?me@host",
        "redis://me:sesa#me@host",
        "redis+sentinel://me:sesame@a:1,b:2/s?db=1",
        "unix://me@/tmp/s?password=sesame&db=0",
        "redis://host?db=0&password=sesame",
        "redis+sentinel://a/s?sentinel_password=sesame",
    ],
)
def test_a_masked_url(url: str) -> None:
    shown = masked(url)
    assert not any(part in shown for part in ("sesa", "esame", "ame@", "ses/"))
    assert "***" in shown


def test_urls_without_a_password_stay() -> None:
    for url in ("redis://host:6379/0", "unix:///tmp/a.sock", "redis+cluster://a:1,b:2", "unix:///tmp/a:b@c"):
        assert masked(url) == url


def test_the_login_of_sentinels_and_clusters(tls: Tls) -> None:
    files = f"password_file={tls.folder}/password&ssl_ca_certs={tls.folder}/ca.pem"
    client = connect(
        f"rediss+sentinel://a,b:1/s/2?username=me&sentinel_password_file={tls.folder}/wrong&{files}"
    )
    kwargs = client.connection_pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("me", PASSWORD, 2)
    assert kwargs["ssl_ca_certs"] == f"{tls.folder}/ca.pem"
    sentinel = client.connection_pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
    assert (sentinel["password"], sentinel["ssl_ca_certs"]) == ("no-sesame", f"{tls.folder}/ca.pem")
    client.close()


def test_no_password_in_what_is_printed(tls: Tls) -> None:
    """Commands, their errors, and the clients' words while they wait."""
    away = f"redis://me:{PASSWORD}@127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-c", "from roq.cli import main; main()"]
    for options in (("--redis", away), ("--redis", f"rediss://:{PASSWORD}@localhost:{tls.port}")):
        done = subprocess.run(
            [*command, "status", *options, "--run", "x", "--wait", "1"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode in (1, 2)
        assert PASSWORD not in done.stdout + done.stderr
        assert "***" in done.stderr
    with pytest.raises(RoqError) as error, Scheduler(away, "x", retry_s=0.1) as sched:
        sched.status()
    assert PASSWORD not in str(error.value)
    done2 = CliRunner().invoke(main, ["status", "--redis", tls.url(), "--run", "none"])
    assert done2.exit_code == 2
    assert PASSWORD not in done2.output


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379",
        "rediss://user:secret@127.0.0.1:1/3",
        "unix:///tmp/s.sock",
        "redis+sentinel://no.such.host.invalid,localhost/service",
        "redis+cluster://127.0.0.1:7000,127.0.0.1:7001",
    ],
)
def test_our_address_on_the_way_to_a_server_that_is_here(url: str) -> None:
    assert own_address(url) == "127.0.0.1"


def test_our_address_on_the_way_to_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"redis://no\.such\.host\.invalid"):
        own_address("redis://no.such.host.invalid")


@pytest.mark.parametrize(
    "option",
    ["decode_responses=True", "socket_timeout=2.5", "socket_connect_timeout=3", "health_check_interval=1"],
)
def test_options_of_the_url(server: Server, option: str) -> None:
    with Scheduler(f"{server.url}?{option}", "u", retry_s=1) as sched:
        sched.create(RunConfig(eta=1, batch_size=1))
        sched.complete(sched.reserve("w", 0, 1).reservations[0], trajectory())
        batch = sched.take("t")
        assert batch is not None
        assert sched.trajectories(batch.groups)
        assert sched.call_stats()["fcall"].calls > 0
        assert sched.wait(10**6, 2.1) == 10**6  # a blocking read is shorter than any timeout
        assert sched.audit().problems == []
    with pytest.raises(ConfigError):
        Scheduler("redis://h?foo=1", "u")


def test_messages_do_not_show_the_password() -> None:
    with Scheduler("redis://user:s3cret@127.0.0.1:1", "u", retry_s=0.1) as sched:
        with pytest.raises(RoqError) as refused:
            sched.status()
        assert "s3cret" not in str(refused.value)
