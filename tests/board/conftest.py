"""A real board (``roq board`` in a process of its own) looked at with a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.conftest import Server

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
SWITCHES += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

# The grid as tests/protocol/play.py writes it, each row with its buffer and state: "1 FULL R:7 R:3 . O:2".
PICTURE = """() => [...document.querySelectorAll('.buffer')].map(row =>
  `${row.dataset.buffer} ${row.dataset.state} ` + [...row.querySelectorAll('.slot')].map(slot =>
    slot.dataset.state === 'empty' ? '.' : `${slot.dataset.state[0].toUpperCase()}:${slot.dataset.group}`
  ).join(' '))"""

# Where groups in flight were drawn: the middles, relative to the slots' corner.
FLIGHTS = """window.flights = [];
  const draw = CanvasRenderingContext2D.prototype.drawImage;
  CanvasRenderingContext2D.prototype.drawImage = function (image, x, y, width, height) {
    if (this.canvas.className === 'flights') flights.push([x + width / 2, y + height / 2]);
    return draw.apply(this, arguments);
  };"""


class Board:
    """``roq board`` with some options, and its address."""

    def __init__(self, *options: str) -> None:
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            "from roq.cli import main; main(prog_name='roq')",
            "board",
        ]
        self._command = [*command, *options]
        self.port = 0
        self.warns = False  # a test that listens beyond loopback expects the warning
        self.start()

    def start(self) -> None:
        """Start, on the port that it had before."""
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "workers", "trainer"))
        self.process = subprocess.Popen(
            [*self._command, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[^/]+:(\d+)/", line)
        if found is None:
            self.process.kill()
            raise AssertionError(f"the board said {line!r} {self.process.communicate()}")
        self.url, self.port = found.group(), int(found.group(1))

    def stop(self) -> str:
        """End it; what it wrote on stderr."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            _, said = self.process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return said


@pytest.fixture
def server(servers: Callable[[str], Server]) -> Server:
    """An empty server; the two kinds differ in nothing that the board sees."""
    server = servers("valkey")
    server.empty()
    return server


@pytest.fixture
def board(server: Server) -> Iterator[Callable[..., Board]]:
    """Start boards: ``board()`` shows the run ``test``; ``board("--events", file)`` something else."""
    started: list[Board] = []

    def start(*options: object) -> Board:
        words = [str(option) for option in options]
        if not {"--events", "--redis"} & set(words):
            words += ["--redis", server.url, "--run", "test"]
        started.append(Board(*words))
        return started[-1]

    yield start
    for one in started:
        said = one.stop()
        assert said.startswith("warning: ") and said.count("\n") == 1 if one.warns else said in ("", None)


@pytest.fixture(scope="module")  # Playwright runs an event loop in this thread: no test may follow beside it
def chromium() -> Iterator[Browser]:
    """The browser."""
    path = shutil.which("chromium")
    if path is None:
        message = "no chromium on this machine (scripts/setup --tests installs it)"
        if os.environ.get("ROQ_CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield browser
        browser.close()


class Watched:
    """What a page complained of, and where it asked."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.expected = re.compile("(?!)")  # complaints that a test provokes

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not self.expected.search(message.text):
            self.complaints.append(message.text)


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages. At the end, none may have complained, or asked another host than its own."""
    opened: list[tuple[Page, Watched]] = []

    def opener(board: Board, expected: str = "(?!)", *, slots: bool = True, **options: object) -> Page:
        page = chromium.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        watched = Watched()
        watched.expected = re.compile(expected)
        page.on("console", watched.console)
        page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        page.on("request", lambda request: watched.hosts.add(urlsplit(request.url).netloc))
        opened.append((page, watched))
        page.add_init_script(FLIGHTS)
        page.goto(board.url)
        if slots:
            page.wait_for_selector(".slot")
        return page

    yield opener
    for page, watched in opened:
        host = urlsplit(page.url).netloc
        page.close()
        assert watched.complaints == []
        assert watched.hosts == {host}


def picture(page: Page) -> list[str]:
    """The grid as it is now."""
    return page.evaluate(PICTURE)


def await_picture(page: Page, expected: list[str]) -> None:
    """Wait until the grid is as expected, at most 10 s."""
    same = f"expected => JSON.stringify(({PICTURE})()) === JSON.stringify(expected)"
    try:
        page.wait_for_function(same, arg=expected, timeout=10_000)
    except Exception:
        assert picture(page) == expected
        raise


def position(page: Page) -> int:
    """How many events the page's picture holds."""
    return int(page.locator("body").get_attribute("data-position") or -1)


def await_position(page: Page, wanted: int) -> None:
    """Wait until the page shows so many events, at most 15 s."""
    page.wait_for_function("n => document.body.dataset.position === String(n)", arg=wanted, timeout=15_000)
