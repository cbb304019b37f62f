"""What `roq up` prints, and the words that it shares with other commands."""

import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq import RunConfig
from roq.observe.display import Display, View
from roq.observe.metrics_log import Records, Step
from roq.observe.words import remaining, slot_row, slot_signs, step_of, total_steps, trainer_text
from roq.types import BufferStatus, SlotStatus, Status, WaitingSlot, WorkerStatus


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
    return View(config=config, status=status, records=records)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_status_line_below_the_steps(view: View) -> None:
    out = Terminal()
    display = Display(out)
    display.update(view)
    display.say("something happened")
    display.update(view)
    display.close()
    status = "\r\033[Kstep 9 of 30: trainer training batch 9; workers: waiting: window_full"
    assert out.getvalue() == (
        f"\r\033[Kresuming after step 9\n{status}\r\033[Ksomething happened\n{status}\r\033[K"
    )


def test_the_status_line_fits_the_terminal(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    Display(out).update(view)
    assert len(out.getvalue().rpartition("\033[K")[2]) == 39


def test_a_run_that_has_just_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.observe.display.SILENCE_S", -1.0)
    out = io.StringIO()
    config = RunConfig(eta=0, batch_size=1)
    Display(out).update(View(config=config, status=Status(run="x"), records=Records("/none")))
    assert (
        out.getvalue() == "trainer waiting for batch 0: nothing is reserved for it yet; workers: starting\n"
    )


def test_the_plain_display_is_one_line_a_step(view: View) -> None:
    out = io.StringIO()
    display = Display(out)
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
    monkeypatch.setattr("roq.observe.display.SILENCE_S", -1.0)
    out = io.StringIO()
    Display(out).update(view)
    assert out.getvalue().splitlines()[-1] == "trainer training batch 9; workers: 2 attached"


def test_slots_in_order_and_in_proportion() -> None:
    assert slot_row(buffer(0, 2, 1, 1, "PENDING")) == "■■·▨"
    row = slot_row(buffer(0, 4095, 1, 0, "PENDING"), width=16)
    assert row == "■" * 15 + "·"
    row = slot_row(buffer(0, 1, 0, 4095, "FULL"), width=16)
    assert (len(row), row.count("■")) == (16, 1)


def test_each_slot_by_its_number() -> None:
    common: dict[str, Any] = {"ordinal": 0, "v_traj": 0, "age_s": 1.0}
    slots = [
        SlotStatus(buffer=3, slot=3, state="reserved", group=5, **common),
        SlotStatus(buffer=3, slot=1, state="occupied", group=4, **common),
        SlotStatus(buffer=4, slot=2, state="occupied", group=6, **common),
    ]
    found = [(sign, slot and slot.group) for sign, slot in slot_signs(buffer(3, 1, 1, 1, "PENDING"), slots)]
    assert found == [("■", 4), ("·", None), ("▨", 5)]


def test_steps_in_all() -> None:
    limited = RunConfig(eta=0, batch_size=8, prompts=20, epochs=2, total_steps=9)
    assert total_steps(limited) == 5, "the prompts are used up first"
    assert step_of(3, limited) == "step 3 of 5"
    endless = RunConfig(eta=0, batch_size=8)
    assert total_steps(endless) is None
    assert step_of(3, endless) == "step 3"


def test_what_the_trainer_does() -> None:
    waiting = WaitingSlot(buffer=3, slot=7, group=40, ordinal=39, age_s=75, owners=["w0", "w1"])
    stuck = Status(version=3, frontier=3, buffers=[buffer(3, 7, 0, 1, "FULL")], waiting=[waiting])
    assert trainer_text(stuck) == (
        "waiting for batch 3: 7 complete, 1 in progress, 0 empty; oldest: slot 7, with w0, w1 for 1:15"
    )
    ready = Status(version=3, frontier=3, buffers=[buffer(3, 8, 0, 0, "READY")])
    assert trainer_text(ready) == "batch 3 is READY; no trainer has joined yet"
    assert trainer_text(Status(ended=True)) == "the run has ended"


def test_remaining_time() -> None:
    steps = [Step(step=i, time=10.0 * i) for i in range(1, 21)]
    assert remaining(steps, 30) == 100
    assert remaining(steps, None) is None
    assert remaining(steps[:1], 30) is None
