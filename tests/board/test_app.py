"""The board's server: what it refuses, how it resumes, and what a slow browser costs it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from playwright.sync_api import Page

from roq import ConfigError, RunConfig, Scheduler
from roq.board.app import accepted_hosts
from roq.cli import main
from roq.events.follow import read_events
from roq.protocol.keys import keys_of
from tests.board.conftest import Board, await_picture, await_position
from tests.conftest import Server
from tests.protocol.play import Named, direct
from tests.users import make_users, url_of

Open = Callable[..., Page]
Start = Callable[..., Board]
OURS = {"X-Roq-Board": "control", "Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def run(sched: Scheduler) -> Named:
    """Six admitted, A complete."""
    run = Named(sched, RunConfig(eta=1, batch_size=4))
    run.admit(0, 6)
    run.complete("A")
    return run


def ask(
    board: Board, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=10)
    connection.request(method, path, None if body is None else json.dumps(body), headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text, answer.headers


def steer(board: Board, action: str, body: object = None, **headers: str | None) -> tuple[int, Any]:
    """As the page does it; a header given as None is left out."""
    given = OURS | {"Origin": board.url.rstrip("/")} | {k.replace("_", "-"): v for k, v in headers.items()}
    return ask(
        board, "POST", f"/api/{action}", body or {}, {k: v for k, v in given.items() if v is not None}
    )[:2]


class Stream:
    """A reader of the board's server-sent events."""

    def __init__(self, board: Board, after: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=20)
        self._connection.request(
            "GET", "/api/events", headers={} if after is None else {"Last-Event-ID": after}
        )
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()

    def message(self) -> tuple[str, Any, str | None]:
        """The next message's kind, data and id."""
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\n")
            if not line and "data" in fields:
                return fields["event"], json.loads(fields["data"]), fields.get("id")
            name, _, value = line.partition(": ")
            fields[name] = value

    def until(self, kind: str) -> tuple[Any, str | None]:
        while True:
            found, data, id_ = self.message()
            if found == kind:
                return data, id_

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_every_answer_forbids_what_a_page_of_ours_never_does(run: Named, board: Start) -> None:
    start = board()
    for path in ("/", "/static/main.js", "/nothing"):
        status, _, headers = ask(start, "GET", path)
        assert status == (404 if path == "/nothing" else 200)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(start, "GET", "/static/../app.py")[0] == 404
    assert ask(start, "GET", "/api/events?after=../x")[0] == 400


def test_another_name_for_localhost_is_refused(run: Named, board: Start) -> None:
    """A page of another site could point a name of its own at 127.0.0.1."""
    start = board()
    assert ask(start, "GET", "/", headers={"Host": f"evil.example:{start.port}"})[0] == 421
    assert ask(start, "GET", "/", headers={"Host": f"localhost:{start.port}"})[0] == 200


def first_line(board: Board, *lines: str) -> bytes:
    """The status line of the answer to a request of these lines, as they are."""
    with socket.create_connection(("127.0.0.1", board.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        return connection.makefile("rb").readline()


def test_hosts_are_read_strictly(run: Named, board: Start) -> None:
    start = board()
    for host in (
        "evil.com@127.0.0.1",
        "127.0.0.1:80:evil",
        "[::1",
        "::1",
        "127.0.0.1.evil.com",
        "127.0.0.1:",
        "",
    ):
        assert b" 421 " in first_line(start, "GET / HTTP/1.1", f"Host: {host}"), host
    twice = ("Host: 127.0.0.1", "Host: evil.com")
    for hosts in (twice, twice[::-1]):
        assert b" 200 " not in first_line(start, "GET / HTTP/1.1", *hosts)
    for host in ("LOCALHOST", "localhost.", f"localhost:{start.port}", "[::1]", "127.0.0.1"):
        assert b" 200 " in first_line(start, "GET / HTTP/1.1", f"Host: {host}"), host


def test_a_rebound_name_is_refused_on_every_address(run: Named, board: Start, sched: Scheduler) -> None:
    """DNS rebinding: a page of another site points its own name at the board, wherever it listens."""
    names = ("--allow-host", "Board.Example", "--allow-host", "10.1.2.3")
    start = board("--host", "0.0.0.0", "--allow-control", *names)
    start.warns = True
    for host in ("evil.example", "0.0.0.0", "board.example.evil", "10.1.2.4", "127.0.0.2"):
        for method, path in (("GET", "/"), ("GET", "/static/main.js"), ("GET", "/api/events")):
            assert ask(start, method, path, headers={"Host": f"{host}:{start.port}"})[0] == 421, (host, path)
        origin = f"http://{host}:{start.port}"
        assert steer(start, "pause", Host=origin.removeprefix("http://"), Origin=origin)[0] == 421, host
    assert not sched.status().paused
    for host in ("localhost", "127.0.0.1", "[::1]", "board.example", "BOARD.EXAMPLE.", "10.1.2.3"):
        assert ask(start, "GET", "/", headers={"Host": f"{host}:{start.port}"})[0] == 200, host
        origin = f"http://{host}:{start.port}"
        assert steer(start, "pause", Host=origin.removeprefix("http://"), Origin=origin)[0] == 200, host
        assert b" 200 " in first_line(start, "GET /api/events HTTP/1.1", f"Host: {host}"), host
    assert sched.status().paused


def test_the_address_that_a_board_listens_on_is_accepted() -> None:
    assert accepted_hosts("127.0.0.1") == {"localhost", "127.0.0.1", "::1"}
    assert accepted_hosts("192.168.7.1") == {"localhost", "127.0.0.1", "::1", "192.168.7.1"}
    more = accepted_hosts("fe80::0:1", ["Host.lan."])
    assert more == {"localhost", "127.0.0.1", "::1", "fe80::1", "host.lan"}
    for wildcard in ("0.0.0.0", "::", "0:0::0"):
        assert accepted_hosts(wildcard) == {"localhost", "127.0.0.1", "::1"}
    for bad in ("", "a:80", "http://a", "a/b", "*"):
        with pytest.raises(ConfigError):
            accepted_hosts("127.0.0.1", [bad])


def test_ids_that_no_event_has(run: Named, board: Start) -> None:
    start = board()
    for after in ("5-5-5", "1-" + "9" * 30, "9" * 5000, "%D9%A3", "%C2%B2", "-1", "1-"):
        assert ask(start, "GET", f"/api/events?after={after}")[0] == 400, after
    assert ask(start, "GET", "/api/events", headers={"Last-Event-ID": "1-" + "9" * 30})[0] == 400


def test_a_board_only_looks_unless_told_otherwise(run: Named, board: Start, sched: Scheduler) -> None:
    start = board()
    drop, drain = {"group": run.group("B")}, {"worker": "w0"}
    for action, body in (("pause", {}), ("resume", {}), ("drop", drop), ("drain", drain)):
        status, said = steer(start, action, body)
        assert status == 403
        assert "--allow-control" in said["error"]
    assert not sched.status().paused
    assert sched.status().ledger.in_slots == 6


def test_only_the_boards_own_page_may_steer(run: Named, board: Start, sched: Scheduler) -> None:
    start = board("--allow-control")
    refused: list[dict[str, Any]] = [
        {"X_Roq_Board": None},
        {"Origin": None},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://localhost:{start.port}"},
        {"Origin": f"foo://127.0.0.1:{start.port}"},
        {"Origin": f"127.0.0.1:{start.port}"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
    ]
    for headers in refused:
        assert steer(start, "pause", **headers)[0] == 403, headers
    assert not sched.status().paused
    assert steer(start, "pause")[0] == 200
    assert sched.status().paused
    assert steer(start, "drop", {"group": run.group("A")})[0] == 409
    assert steer(start, "drop", {"group": 999})[0] == 404
    assert steer(start, "drop", {"group": "B; FLUSHALL"})[0] == 400
    for group in (-1, 2**53, 10**30, 1.5):
        assert steer(start, "drop", {"group": group})[0] == 400
    assert steer(start, "drain", {"worker": "nobody"})[0] == 404
    for worker in ("", "a b", "x" * 500, 7):
        assert steer(start, "drain", {"worker": worker})[0] == 400, worker
    assert ask(start, "GET", "/api/pause")[0] == 405


def test_no_action_reads_a_long_body(run: Named, board: Start, sched: Scheduler) -> None:
    start = board("--allow-control")
    for action in ("pause", "resume", "drop", "drain"):
        status, said = steer(start, action, {"group": run.group("B"), "more": "x" * 5000})
        assert (status, "longer than 4096 bytes" in said["error"]) == (413, True), action
    before = psutil.Process(start.process.pid).memory_info().rss
    headers = OURS | {"Origin": start.url.rstrip("/"), "Content-Length": str(200_000_000)}
    with socket.create_connection(("127.0.0.1", start.port), timeout=10) as link:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        link.sendall(f"POST /api/drop HTTP/1.1\r\nHost: 127.0.0.1:{start.port}\r\n{head}\r\n".encode())
        with contextlib.suppress(ConnectionError):  # the board has answered and hung up
            for _ in range(200):
                link.sendall(b"x" * 1_000_000)
    assert psutil.Process(start.process.pid).memory_info().rss - before < 20_000_000
    assert not sched.status().paused
    assert sched.status().ledger.in_slots == 6


def test_steering_takes_the_rights_of_an_operator(
    run: Named, board: Start, server: Server, tmp_path: Path
) -> None:
    make_users(server, tmp_path)
    for role, code in (("board", 403), ("operator", 200)):
        start = board("--allow-control", "--redis", url_of(server, tmp_path, role), "--run", "test")
        for action, body in (("pause", {}), ("resume", {}), ("drain", {"worker": "w0"})):
            status, said = steer(start, action, body)
            assert status == code, said
            assert code == 200 or "use a user of role operator or owner" in said["error"]


def test_control_from_the_page(run: Named, board: Start, sched: Scheduler, open_page: Open) -> None:
    page = open_page(board("--allow-control"))
    await_picture(page, ["0 PENDING O:1 . . R:5", "1 FULL R:4 R:3 R:2 R:6"])
    page.locator("#pause").click()
    page.wait_for_selector("#run-state[data-state='paused']")
    assert sched.status().paused
    page.locator("#resume").click()
    page.wait_for_selector("#run-state[data-state='running']")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".slot[data-place='1.1']").focus()
    page.locator("#drop").click()
    await_picture(page, ["0 PENDING O:1 . . R:5", "1 PENDING . R:3 R:2 R:6"])
    page.locator(".drain[data-worker='w0']").click()
    page.wait_for_function("() => document.querySelector('#steered').textContent.includes('w0 leaves when')")
    page.locator(".drain[data-worker='w0']").wait_for(state="hidden")
    assert [worker.draining for worker in sched.status().workers] == [True]
    reasons = {e.name: e.get("reason") for e in read_events(sched) if "reason" in e.fields}
    assert reasons == dict.fromkeys(("paused", "resumed", "requeued", "draining"), "by hand, on the board")


def test_a_page_that_only_looks_has_no_controls(run: Named, board: Start, open_page: Open) -> None:
    page = open_page(board())
    page.locator(".slot[data-place='1.1']").focus()
    page.wait_for_function("() => document.querySelector('#details-title').textContent === 'Slot 1.1'")
    page.wait_for_selector("#workers tbody tr")
    for control in ("#pause", "#resume", "#drop", ".drain"):
        assert not page.locator(control).is_visible()


def test_a_stream_resumes_after_the_event_that_it_had(run: Named, board: Start, sched: Scheduler) -> None:
    start = board()
    first = Stream(start)
    beginning, begun = first.until("begin")
    assert (beginning["run"], begun) == ("test", "0-0")
    events, last = first.until("events")
    first.close()
    run.complete("B")
    again = Stream(start, last)
    kind, more, _ = again.message()
    assert kind == "events"
    assert [(event["event"], event.get("group")) for event in more] == [("complete", "2"), ("occupy", "2")]
    again.close()
    # An id that this stream has never had: another run of the name. The page begins again.
    future = Stream(start, "9999999999999-0")
    assert future.message()[0] == "begin"
    future.close()
    assert [event["event"] for event in events] == [e.name for e in read_events(sched)][: len(events)]


def test_a_stream_whose_next_events_are_gone_begins_again(sched: Scheduler, board: Start) -> None:
    sched.create(RunConfig(eta=1, batch_size=2, event_log=100))
    start = board()
    first = Stream(start)
    _, early = first.until("events")
    first.close()
    assert start.stop() == ""
    for i in range(300):
        sched.renew(f"x{i}", 0)
        sched.leave(f"x{i}")
    sched.reserve("w0", 0, 1)
    start.start()
    again = Stream(start, early)
    kind, beginning, at = again.message()
    assert kind == "begin"
    assert [group["at"] for group in beginning["picture"]["groups"]] == ["1.2"]
    assert at == list(read_events(sched))[-1].id
    again.close()


def test_the_page_goes_on_when_the_server_comes_back(
    run: Named, board: Start, sched: Scheduler, open_page: Open
) -> None:
    start = board()
    page = open_page(start, expected="Failed to load resource: net::ERR_|ERR_INCOMPLETE_CHUNKED_ENCODING")
    await_picture(page, ["0 PENDING O:1 . . R:5", "1 FULL R:4 R:3 R:2 R:6"])
    page.evaluate("() => { document.querySelector('.buffer').marked = true }")
    assert start.stop() == ""
    page.wait_for_selector("#trouble:visible")
    for name in "BC":
        run.complete(name)
    start.start()
    await_picture(page, ["0 PENDING O:1 O:2 O:3 .", "1 PENDING . R:4 R:5 R:6"])
    assert page.evaluate(
        "() => document.querySelector('.buffer').marked"
    )  # it went on, it did not begin anew
    await_position(page, sum(1 for _ in read_events(sched)))
    page.wait_for_selector("#trouble", state="hidden")


def test_the_page_outlives_redis(tmp_path: Path, open_page: Open) -> None:
    own = Server("valkey", tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    try:
        with Scheduler(own.url, "test", retry_s=10) as sched:
            run = Named(sched, RunConfig(eta=1, batch_size=4))
            run.admit(0, 6)
            start = Board("--redis", own.url, "--run", "test")
            page = open_page(start)
            await_picture(page, ["0 PENDING . . R:6 R:5", "1 FULL R:4 R:3 R:2 R:1"])
            own.kill()
            page.wait_for_selector("#trouble:visible", timeout=15_000)
            own.start()
            run.complete("A")
            await_picture(page, ["0 PENDING O:1 . . R:5", "1 FULL R:4 R:3 R:2 R:6"])
            page.wait_for_selector("#trouble", state="hidden")
            said = start.stop()
            assert "waiting for Redis" in said
            assert "Traceback" not in said
    finally:
        own.kill()


def test_a_browser_that_stands_still_costs_nothing(sched: Scheduler, board: Start) -> None:
    """It is sent no more than its socket takes; another one is served meanwhile."""
    sched.create(RunConfig(eta=1, batch_size=2))
    key = keys_of(sched.run)["events"]
    with direct(sched) as client, client.pipeline(transaction=False) as pipe:
        for i in range(15_000):  # 700 bytes each: more than the system's own buffers take
            pipe.xadd(key, {"event": "release", "group": i, "member": 1, "worker": "w0", "reason": "r" * 600})
        newest = pipe.execute()[-1].decode()
    kept = 10 * sum(len(event.line()) for event in read_events(sched))
    start = board()
    process = psutil.Process(start.process.pid)

    still: list[socket.socket] = []
    for _ in range(10):
        one = socket.socket()
        one.settimeout(30)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", start.port))
        one.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        still.append(one)
    for one in still:
        assert one.recv(1, socket.MSG_PEEK)  # each has been sent what its socket takes
    time.sleep(1.0)
    before = process.memory_info().rss
    other = Stream(start)
    last = None
    while last != newest:
        _, last = other.until("events")
    time.sleep(1.0)
    grown = process.memory_info().rss - before
    other.close()
    for one in still:
        one.close()
    assert grown < kept / 3, f"{grown / 1e6:.1f} MB of {kept / 1e6:.1f} MB"
    print(f"{grown / 1e6:.1f} MB for 10 browsers that are {kept / 1e6:.1f} MB behind")


def test_bad_input_is_told_in_one_line(sched: Scheduler, tmp_path: Path) -> None:
    sched.create(RunConfig(eta=1, batch_size=2))
    run = ["--redis", sched.url, "--run", "test"]
    file = tmp_path / "events.jsonl"
    file.write_text('{"id":"1-0","event":"created"}\n')
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    cases = [
        ([], "--events"),
        (["--events", str(tmp_path / "nothing"), "--port", "0"], "cannot be read"),
        (["--events", str(file), "--port", "0"], str(file)),
        (["--events", str(file), "--allow-control"], "--allow-control"),
        ([*run[:2], "--run", "other", "--port", "0"], "there is no run 'other'"),
        ([*run, "--port", port], "cannot listen on 127.0.0.1"),
        ([*run, "--port", "70000"], "70000"),
    ]
    for words, sentence in cases:
        done = CliRunner().invoke(main, ["board", *words], env={"ROQ_REDIS": None, "ROQ_RUN": None})
        assert done.exit_code == 2, (words, done.output)
        assert sentence in " ".join(done.output.split()), (words, done.output)
        assert "Traceback" not in done.output
    taken.close()


def test_the_page_names_the_charts_library_that_it_ships() -> None:
    folder = Path(__file__).resolve().parents[2] / "roq" / "board" / "static"
    version = (folder / "vendor" / "uplot" / "VERSION").read_text()
    assert re.match(r"uPlot \d+\.\d+\.\d+, https://github.com/leeoniya/uPlot \(MIT\)", version)
    assert "MIT License" in (folder / "vendor" / "uplot" / "LICENSE").read_text()
    ours = [
        file
        for file in folder.rglob("*")
        if file.suffix in (".js", ".css", ".html") and "vendor" not in file.parts
    ]
    assert not [file.name for file in ours if re.search(r"https?://(?!www\.w3\.org)", file.read_text())]
