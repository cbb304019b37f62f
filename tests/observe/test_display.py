"""What people see: the pieces of text, the plain lines and the live picture."""

import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from roq import RunConfig
from roq.observe.display import (
    PlainDisplay,
    View,
    rate,
    remaining,
    slot_row,
    sparkline,
    trainer_text,
)
from roq.observe.live import make_display, render
from roq.observe.metrics_log import Records, Step, WorkerLine
from roq.types import BufferStatus, Status, WaitingSlot, WorkerStatus


def buffer(number: int, occupied: int, empty: int, reserved: int, state: str) -> BufferStatus:
    counts: dict[str, Any] = {"occupied": occupied, "empty": empty, "reserved": reserved, "state": state}
    return BufferStatus(buffer=number, **counts)


@pytest.fixture
def view(tmp_path: Path) -> View:
    now = time.time()
    rows = [
        {
            "step": i + 1,
            "time": now - 40 + 4 * i,
            "reward/mean": i / 10,
            "staleness/mean": 0.5,
            "staleness/max": 1,
            "tokens/response": 2000,
            "time/step": 3.0,
            "time/wait_for_batch": 1.0,
            "wall_s": 4.0 * i + 4,
        }
        for i in range(9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "workers").mkdir()
    lines = [
        {"time": now - 6, "wall_s": 30, "tokens": 9000},
        {"time": now - 1, "wall_s": 35, "tokens": 10500},
    ]
    (tmp_path / "workers" / "host-1-abc.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = Records(tmp_path)
    records.read()
    info = '{"doing": "waiting: window_full"}'
    status = Status(
        run="demo",
        version=9,
        frontier=10,
        training=9,
        trainer="t0",
        inflight=6,
        buffers=[buffer(9, 8, 0, 0, "TRAINING"), buffer(10, 3, 2, 3, "PENDING")],
        workers=[WorkerStatus(worker="host-1-abc", version=9, claims=6, lease_left_s=27.0, info=info)],
    )
    config = RunConfig(eta=1, batch_size=8, total_steps=30)
    return View(
        config=config, status=status, records=records, processes={"worker-1": "running", "trainer": "running"}
    )


def shown(view: View, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(view, width))
    return console.export_text()


def test_the_live_picture_tells_everything(view: View) -> None:
    text = shown(view)
    for piece in (
        "step 9 of 30",
        "1:24 left",
        "buffer 9   TRAINING  ■■■■■■■■  8/8",
        "buffer 10  PENDING   ■■■··▨▨▨  3/8",
        "■ Occupied  ▨ Reserved  · Empty",
        "reward         ▁▁▂▃▄▅▆▇█",
        "0.800  (0.000 to 0.800)",
        "trainer  trains batch 9",
        "host-1-abc        9          6       300   27 s  waiting: window_full",
    ):
        assert piece in text, text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_every_terminal(view: View, width: int) -> None:
    assert max(map(len, shown(view, width).splitlines())) <= width


def test_it_shows_a_run_that_has_just_begun() -> None:
    view = View(
        config=RunConfig(eta=0, batch_size=1), status=Status(run="x"), records=Records("/none"), processes={}
    )
    assert "waits for batch 0: nothing is reserved for it yet" in shown(view)


def test_the_plain_display_is_one_line_a_step(view: View) -> None:
    out = io.StringIO()
    display = make_display(out)
    assert isinstance(display, PlainDisplay)
    display.update(msgspec.structs.replace(view, records=Records("/none"), status=Status()))
    display.update(view)
    display.update(view)
    lines = out.getvalue().splitlines()
    assert len(lines) == 9
    assert lines[0] == "step 1/30  reward 0.000  staleness 0.50 (max 1)  2,000 tokens  3.0 s  waited 1.0 s"
    assert lines[-1].endswith("  1:24 left")


def test_workers_that_say_nothing_of_themselves(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [WorkerStatus(worker=name, lease_left_s=9.0) for name in ("mine", "yours")]
    view = msgspec.structs.replace(
        view, records=Records("/none"), status=msgspec.structs.replace(view.status, workers=workers)
    )
    assert "?" not in shown(view)
    monkeypatch.setattr("roq.observe.display.SILENCE_S", -1.0)
    out = io.StringIO()
    make_display(out).update(view)
    assert out.getvalue().splitlines()[-1] == "trainer trains batch 9; workers: 2 attached"


def test_slots_in_order_and_in_proportion() -> None:
    assert slot_row(buffer(0, 2, 1, 1, "PENDING")) == "■■·▨"
    row = slot_row(buffer(0, 4095, 1, 0, "PENDING"), width=16)
    assert row == "■" * 15 + "·"
    row = slot_row(buffer(0, 1, 0, 4095, "FULL"), width=16)
    assert (len(row), row.count("■")) == (16, 1)


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5]) == "▄▄"
    assert sparkline([0, 0.5, 1]) == "▁▄█"
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


def test_what_the_trainer_does() -> None:
    waiting = WaitingSlot(buffer=3, slot=7, group=40, ordinal=39, age_s=75, owners=["w0", "w1"])
    stuck = Status(version=3, frontier=3, buffers=[buffer(3, 7, 0, 1, "FULL")], waiting=[waiting])
    assert trainer_text(stuck) == (
        "waits for batch 3: 7 complete, 1 in work, 0 empty; oldest: slot 7, with w0, w1 for 1:15"
    )
    ready = Status(version=3, frontier=3, buffers=[buffer(3, 8, 0, 0, "READY")])
    assert trainer_text(ready) == "batch 3 is READY; no trainer has come yet"
    assert trainer_text(Status(ended=True)) == "the run has ended"


def test_rates() -> None:
    lines = [WorkerLine(time=100, wall_s=5, tokens=500), WorkerLine(time=105, wall_s=10, tokens=2000)]
    assert rate(lines, now=106) == 300
    assert rate(lines[:1], now=101) == 100
    assert rate(lines, now=200) == 0, "silent for long"
    steps = [Step(step=i, time=10.0 * i) for i in range(1, 21)]
    assert remaining(steps, 30) == 100
    assert remaining(steps, None) is None
    assert remaining(steps[:1], 30) is None
