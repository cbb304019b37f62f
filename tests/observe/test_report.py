"""The report: what it reckons from events with known times, and the page in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, sync_playwright

from roq import RunConfig
from roq.cli import main
from roq.errors import ConfigError
from roq.events.archive import Archive
from roq.events.event import Event
from roq.events.follow import read_events
from roq.events.history import Batch
from roq.observe.metrics_log import Records
from roq.observe.report import write_report
from roq.observe.summary import summarize, summary_lines
from roq.observe.timeline import Timeline, cause, timeline_of, verdict, wait_shares
from roq.types import Status
from tests.protocol.play import Named

CHROMIUM = "/usr/bin/chromium"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


def events(*lines: str) -> Iterator[Event]:
    """Events from lines such as "2.5 take version=0 groups=1_2"; the time is in seconds, _ is a blank."""
    for i, line in enumerate(lines):
        time, name, *fields = line.split()
        pairs = dict(field.split("=", 1) for field in fields)
        values = {key: value.replace("_", " ") for key, value in pairs.items()}
        yield Event(f"{round(float(time) * 1000)}-{i}", {"event": name, **values})


RUN = (
    "1 created",
    "2 worker_joined worker=w0",
    "2 worker_joined worker=w1",
    "2 trainer_joined trainer=t0",
    "3 reserve group=1 ordinal=0 members=1,2 at=1.2 v_traj=0 worker=w0",
    "3 reserve group=2 ordinal=1 members=1,2 at=1.1 v_traj=0 worker=w1",
    "5 complete group=1 member=1 worker=w0 tokens=10 reward=1",
    "5 complete group=1 member=2 worker=w0 tokens=20 reward=0",
    "5 occupy group=1 ordinal=0 at=0.1 v_traj=0",
    "6 complete group=2 member=1 worker=w1 tokens=10 reward=1",
    "6 expired group=2 member=2 worker=w1",
    "6 worker_lost worker=w1",
    "7 reissue group=2 ordinal=1 members=2 at=1.1 v_traj=0 worker=w0",
    "12 complete group=2 member=2 worker=w0 tokens=100 reward=1",
    "12 occupy group=2 ordinal=1 at=0.2 v_traj=0",
    "12 take version=0 trainer=t0 groups=1_2",
    "14 publish version=1 trainer=t0",
    "14 reserve group=3 ordinal=2 members=1,2 at=2.2 v_traj=0 worker=w0",
    "15 filtered group=3 ordinal=2 from=reserved_2.2 reason=zero_variance",
    "16 paused",
    "18 resumed",
)


def test_what_is_reckoned() -> None:
    timeline = timeline_of(events(*RUN))
    (step,) = timeline.steps
    assert (step.wait_s, step.train_s, step.tokens, step.reward) == (10, 2, 140, 0.75)
    assert step.staleness == {0: 2}
    assert timeline.eta == 2  # the farthest reservation
    assert timeline.tokens() == {"trained": 140, "filtered": 0}
    assert timeline.attached == {"w0": [(2, 18)], "w1": [(2, 6)]}
    assert timeline.idle == {"w0": [(2, 3), (5, 7), (12, 14), (15, 18)], "w1": [(2, 3)]}
    assert timeline.idle_share((1, 18)) == pytest.approx(9 / 20)
    assert (timeline.began, timeline.at_work, timeline.time) == (1, 3, 18)
    assert timeline.waits == [(2, 12), (14, 18)]
    assert timeline.pauses == [(16, 18)]
    assert cause(timeline, step) == (
        "its last group was 2 (prompt 1); member 2 took w0 5.0 s for 100 tokens, in attempt 2; "
        "for 7.0 s it was the only one missing"
    )


def test_causes() -> None:
    nobody = ["1 created", "1 trainer_joined trainer=t0", "6 worker_joined worker=w0",
              "6 reserve group=1 ordinal=0 members=1 at=0.1 v_traj=0 worker=w0",
              "6 paused", "9 resumed",
              "9 complete group=1 member=1 worker=w0 tokens=5 reward=1",
              "10 judging group=1 ordinal=0 worker=w0",
              "12 occupy group=1 ordinal=0 at=0.1 v_traj=0", "12 take version=0 groups=1"]  # fmt: skip
    told = timeline_of(events(*nobody))
    said = cause(told, told.steps[0])
    assert "engines start" not in said  # there was none to start
    assert said.startswith("no worker was attached for 5.0 s; admission was paused for 3.0 s; its last")
    assert "reserved 5.0 s into the wait" in said
    assert "its post-processing took 3.0 s" in said


def lockstep(wait: float, train: float, busy: float) -> Timeline:
    """Ten steps; the workers have work for ``busy`` seconds after each publish."""
    lines, time = ["0 created", "0 worker_joined worker=w0", "0 trainer_joined trainer=t0"], 0.0
    for v in range(10):
        lines.append(f"{time} reserve group={v} ordinal={v} members=1 at={v}.1 v_traj={v} worker=w0")
        done = f"{time + busy} complete group={v} member=1 worker=w0 tokens=5 reward=1"
        occupy = f"{time + busy} occupy group={v} ordinal={v} at={v}.1 v_traj={v}"
        take = f"{time + wait} take version={v} groups={v}"
        time += wait + train
        lines += sorted((done, occupy, take), key=lambda line: float(line.split()[0]))
        lines.append(f"{time} publish version={v + 1}")
    return timeline_of(events(*lines), RunConfig(eta=0, batch_size=1))


@pytest.mark.parametrize(
    ("wait", "train", "busy", "said"),
    [
        (9, 1, 9.5, "Generation limits this run: the trainer waited 90% of the time"),
        (0.5, 9.5, 0.4, "Training limits this run: the trainer waited 5% of the time"),
        (
            5,
            5,
            5,
            "Each side waits for the other: the trainer waited 50% of the time, the workers were idle 50%",
        ),
        (0.5, 9.5, 9.9, "Both sides are busy"),
    ],
)
def test_verdicts(wait: float, train: float, busy: float, said: str) -> None:
    assert verdict(lockstep(wait, train, busy)).startswith(said)


def test_one_definition_of_waiting(tmp_path: Path) -> None:
    """The page's numbers, its verdict and the summary of ``roq up`` cover the same time."""
    timeline = lockstep(4, 1, 2)
    found = wait_shares(timeline)
    assert found is not None
    assert (found.trainer_s, found.trainer, found.workers) == (36, 0.8, pytest.approx(0.6))
    write_report(timeline, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<dt>trainer waited, after step 1</dt><dd>36.0 s, 80%</dd>" in page
    assert "<dt>workers idle, after step 1</dt><dd>60%</dd>" in page
    assert "the trainer waited 80% of the time, the workers were idle 60% of the time" in page
    config = RunConfig(eta=0, batch_size=1)
    summary = summarize(Records(tmp_path), Status(run="demo"), config, [], None, found)
    assert dict(summary_lines(summary))["waiting"].endswith("after step 1 80% and 60% of their time")


def test_no_step_no_verdict() -> None:
    assert verdict(Timeline()) == "Too few steps to find this run's bottleneck."
    with pytest.raises(ConfigError, match="batch"):
        write_report(Timeline(), Path("nowhere.html"))
    assert Batch(0, None, 5.0, []).wait_s == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium.new_page()
        chromium.close()


def test_the_page_needs_nothing_else(tmp_path: Path, browser: Page) -> None:
    timeline = lockstep(5, 5, 5)
    timeline.run = 'a<b>"c'  # no name that could be, but nothing may come through
    out = tmp_path / "report.html"
    written = write_report(timeline, out)
    pngs = [path for path in written if path.suffix == ".png"]
    names = ["idle", "reward", "staleness", "steps", "throughput"]
    assert sorted(path.stem for path in pngs) == names
    assert all(path.parent == tmp_path / "report" and path.read_bytes()[:4] == b"\x89PNG" for path in pngs)

    told: list[str] = []
    browser.on("console", lambda message: told.append(message.text))
    browser.on("request", lambda request: told.append(request.url))
    for scheme in ("light", "dark"):
        browser.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        browser.goto(out.as_uri())
        assert browser.inner_text("h1") == 'Run a<b>"c'
        assert sorted(browser.eval_on_selector_all("figure", "all => all.map(f => f.id)")) == names
        assert "Each side waits for the other" in browser.inner_text("p.verdict")
        page = browser.eval_on_selector("body", "body => getComputedStyle(body).backgroundColor")
        ink = browser.eval_on_selector("figure svg text", "text => getComputedStyle(text).fill")
        light = scheme == "light"
        assert (sum(map(int, re.findall(r"\d+", page)[:3])) > 600) == light
        assert (sum(map(int, re.findall(r"\d+", ink)[:3])) < 400) == light
    assert set(told) == {out.as_uri()}


def test_the_command(example: Named, tmp_path: Path) -> None:
    sched = example.sched
    out = tmp_path / "page.html"
    where = ["--redis", sched.url, "--run", sched.run]
    done = CliRunner().invoke(main, ["report", *where, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["files"][0] == str(out)
    page = out.read_text()
    assert "Run demo" in page
    assert "η = 1" in page
    file = tmp_path / "events.jsonl"
    with Archive(file, sched.run, sched.config()) as archive:
        archive.append(read_events(sched))
    again = CliRunner().invoke(main, ["report", "--events", str(file), "--out", str(tmp_path / "b.html")])
    assert again.exit_code == 0, again.output
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert figures == re.findall(r"<figure.*?</figure>", (tmp_path / "b.html").read_text(), re.DOTALL)
    nobody = CliRunner().invoke(main, ["report", "--out", str(out)])
    assert nobody.exit_code == 2
