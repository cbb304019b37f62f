"""The page shows the worked example of the design as it happens, and again; in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from roq import RunConfig, Scheduler
from tests.board.conftest import Board, await_picture, await_position, picture, position
from tests.protocol.play import Named

Open = Callable[..., Page]
Start = Callable[..., Board]


class Shown:
    """The worked example, on a page. ``see`` takes the rows with letters for groups."""

    def __init__(self, sched: Scheduler, page: Page, run: Named) -> None:
        self.sched = sched
        self.page = page
        self.run = run
        self.moments: list[tuple[int, list[str]]] = []

    def see(self, *rows: str) -> None:
        wanted = [self.numbers(row) for row in rows]
        await_picture(self.page, wanted)
        self.moments.append((position(self.page), wanted))

    def numbers(self, row: str) -> str:
        return " ".join(
            f"{word[:2]}{self.run.group(word[2])}" if word[1:2] == ":" else word for word in row.split()
        )


def play(run: Named, see: Callable[..., None]) -> None:
    """The fourteen steps, with what is to be seen after each."""
    run.admit(0, 6)
    see("0 PENDING . . R:F R:E", "1 FULL R:D R:C R:B R:A")
    run.complete("A")
    see("0 PENDING O:A . . R:E", "1 FULL R:D R:C R:B R:F")
    run.admit(0, 1)
    see("0 PENDING O:A . R:G R:E", "1 FULL R:D R:C R:B R:F")
    run.complete("D")
    run.admit(0, 1)
    see("0 FULL O:A O:D R:H R:E", "1 FULL R:G R:C R:B R:F")
    run.complete("C")
    see("0 FULL O:A O:D O:C R:E", "1 FULL R:G R:H R:B R:F")
    run.complete("E")
    see("0 READY O:A O:D O:C O:E", "1 FULL R:G R:H R:B R:F")
    run.take()
    see("0 TRAINING T:A T:D T:C T:E", "1 FULL R:G R:H R:B R:F")
    run.complete("F")
    see("0 TRAINING T:A T:D T:C T:E", "1 FULL O:F R:H R:B R:G")
    run.complete("G")
    see("0 TRAINING T:A T:D T:C T:E", "1 FULL O:F O:G R:B R:H")
    run.publish(1)
    see("1 FULL O:F O:G R:B R:H", "2 PENDING . . . .")
    run.admit(1, 4)
    see("1 FULL O:F O:G R:B R:H", "2 FULL R:L R:K R:J R:I")
    run.complete("J")
    see("1 FULL O:F O:G R:B R:H", "2 FULL O:J R:K R:L R:I")
    run.complete("H")
    see("1 FULL O:F O:G O:H R:B", "2 FULL O:J R:K R:L R:I")
    run.complete("K")
    see("1 FULL O:F O:G O:H R:B", "2 FULL O:J O:K R:L R:I")
    run.complete("B")
    run.take()
    see("1 TRAINING T:F T:G T:H T:B", "2 FULL O:J O:K R:L R:I")
    run.complete("L")
    run.complete("I")
    see("1 TRAINING T:F T:G T:H T:B", "2 READY O:J O:K O:L O:I")
    run.publish(2)
    run.take()
    see("2 TRAINING T:J T:K T:L T:I", "3 PENDING . . . .")


@pytest.fixture
def shown(sched: Scheduler, board: Start, open_page: Open) -> Shown:
    run = Named(sched, RunConfig(eta=1, batch_size=4))
    return Shown(sched, open_page(board(), expected="getImageData"), run)  # colour() reads the canvas


def colour(page: Page, group: int) -> list[int]:
    """What is painted near the lower left corner of the group's slot, once nothing flies any more."""
    page.wait_for_timeout(600)
    return page.evaluate(
        """group => {
          const canvas = document.querySelector('canvas.slots'), whole = canvas.getBoundingClientRect();
          const slot = document.querySelector(`.slot[data-group='${group}']`).getBoundingClientRect();
          const [x, y] = [slot.left - whole.left + 8, slot.bottom - whole.top - 14];
          const at = (length) => length * devicePixelRatio;
          return [...canvas.getContext('2d').getImageData(at(x), at(y), 1, 1).data];
        }""",
        group,
    )


def middle(page: Page, place: str) -> tuple[float, float]:
    slot = page.locator(f".slot[data-place='{place}']").bounding_box()
    whole = page.locator("canvas.slots").bounding_box()
    assert slot is not None
    assert whole is not None
    return slot["x"] + slot["width"] / 2 - whole["x"], slot["y"] + slot["height"] / 2 - whole["y"]


def seen_between(page: Page, start: str, goal: str) -> bool:
    """Whether something was drawn on the straight way between two slots, away from both."""
    (x0, y0), (x1, y1) = middle(page, start), middle(page, goal)
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    for x, y in page.evaluate("flights"):
        along = ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / length**2
        beside = abs((x - x0) * (y1 - y0) - (y - y0) * (x1 - x0)) / length
        if 0.02 < along < 0.98 and beside < 2:
            return True
    return False


def test_the_worked_example_live_and_again(shown: Shown) -> None:
    page, run = shown.page, shown.run
    colours: list[list[int]] = []

    def see(*rows: str) -> None:
        step = len(shown.moments) + 1
        shown.see(*rows)
        if step in (1, 2, 7):  # A is Reserved, Occupied, in training
            colours.append(colour(page, run.group("A")))
        if step == 2:  # compaction is seen as motion
            assert seen_between(page, "0.3", "1.4")
            assert seen_between(page, "1.4", "0.1")
            assert not seen_between(page, "1.2", "1.4")
        page.evaluate("() => { flights.length = 0 }")

    play(run, see)
    assert len({tuple(one) for one in colours}) == 3
    assert all(one[3] == 255 for one in colours)

    # The slider finds every moment again, forwards, backwards and in jumps.
    moments = shown.moments
    for moment, wanted in [*moments, *moments[::-1], *moments[::5]]:
        page.locator("#slider").fill(str(moment))
        await_picture(page, wanted)
    assert page.locator("#live").get_attribute("aria-pressed") == "false"
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    await_picture(page, ["0 PENDING . . . .", "1 PENDING . . . ."])
    for _ in range(moments[0][0]):
        page.keyboard.press("ArrowRight")
    await_picture(page, moments[0][1])
    page.locator("#live").click()
    await_picture(page, moments[-1][1])


def test_replay_plays_by_itself_to_the_end(shown: Shown) -> None:
    play(shown.run, shown.see)
    page = shown.page
    page.locator("#to-start").click()
    await_picture(page, ["0 PENDING . . . .", "1 PENDING . . . ."])
    page.locator("#speed").select_option("step 10")
    page.locator("#play").click()
    page.wait_for_function("n => Number(document.body.dataset.position) > n", arg=3)
    page.locator("#play").click()  # pause
    standing = position(page)
    page.wait_for_timeout(300)
    assert position(page) == standing
    page.locator("#speed").select_option("time 64")
    page.locator("#play").click()
    await_picture(page, shown.moments[-1][1])
    assert page.locator("#live").get_attribute("aria-pressed") == "true"


def test_the_panels_tell_what_the_run_knows(shown: Shown, sched: Scheduler) -> None:
    page, run = shown.page, shown.run
    play(run, shown.see)
    sched.publish(3, "weights/3", "t0", metrics={"reward/mean": 0.625})
    run.admit(3, 3)
    shown.see("3 PENDING . . . .", "4 PENDING . R:O R:N R:M")
    status = sched.status()
    text = page.locator
    # panels are written a moment after the grid
    page.wait_for_function("() => document.querySelector('#version').innerText === '3'")
    assert status.version == 3
    assert text("#running li").count() == 3
    assert text("#issued").inner_text() == str(status.ledger.issued)
    for name in ("trained", "in_slots", "requeued", "filtered", "discarded", "dead"):
        assert text(f"#ledger-{name} dd").inner_text() == str(getattr(status.ledger, name)), name
    assert text("#trainer-text").inner_text() == "waiting for batch 3: 0 complete, 0 in progress, 4 empty"
    rows = text("#workers tbody tr").all_inner_texts()
    assert [row.split("\t")[:4] for row in rows] == [["w0", "v3", "3", "12"]]
    sched.renew("own")  # clients of one's own, which say nothing or odd things of themselves
    sched.renew("odd", 0, {"tokens_per_s": "fast", "doing": ["this", "that"]})
    page.wait_for_function("() => document.querySelector('#workers').innerText.includes('this,that')")
    rows = text("#workers tbody tr").all_inner_texts()
    assert rows[1].split("\t")[:5] == ["own", "–", "0", "0", "0"]
    assert rows[2].split("\t")[:5] == ["odd", "v0", "0", "0", "0"]
    assert text("#running .bar").all_inner_texts() == ["w0 · v3"] * 3
    counts = "[...document.querySelectorAll('#staleness .number')].map(item => item.textContent).join()"
    page.wait_for_function(f"() => {counts} === '4 · 33 %,8 · 67 %'")
    label = "document.querySelector('#chart-reward .plot').getAttribute('aria-label')"
    page.wait_for_function(f"() => {label} === 'Reward by version: mean reward now 0.63'")


def test_a_run_that_has_ended_shows_its_last_batch(sched: Scheduler, board: Start, open_page: Open) -> None:
    """Live to the end, opened afterwards, and where its events are trimmed."""
    run = Named(sched, RunConfig(eta=0, batch_size=2, total_steps=1, event_log=100))
    address = board()
    live = open_page(address)
    run.admit(0, 2)
    for name in "AB":
        run.complete(name)
    run.take()
    last = [f"0 TRAINING T:{run.group('A')} T:{run.group('B')}"]
    await_picture(live, last)
    assert not live.locator("#over").is_visible()
    run.publish(1)
    for page in (live, open_page(address)):
        page.wait_for_selector("#run-state[data-state='ended']")
        await_picture(page, last)
        assert page.locator("#over").inner_text() == (
            "The run has ended. This is batch 0, the last one, in training."
        )
        page.locator(".slot[data-place='0.1']").hover()
        page.wait_for_function("() => /^Training/.test(document.querySelector('#details-text').innerText)")
        page.locator("#slider").fill("0")
        await_picture(page, ["0 PENDING . ."])
        assert not page.locator("#over").is_visible()
        page.locator("#live").click()
        await_picture(page, last)
    for i in range(200):
        sched.renew(f"x{i}", 0)
        sched.leave(f"x{i}")
    late = open_page(address, slots=False)
    late.wait_for_selector("#run-state[data-state='ended']")
    assert picture(late) == []
    assert "last batch is not in this history" in late.locator("#over").inner_text()


def test_a_slots_details_by_pointer_and_by_keyboard(shown: Shown) -> None:
    page, run = shown.page, shown.run
    run.admit(0, 6)
    shown.see("0 PENDING . . R:F R:E", "1 FULL R:D R:C R:B R:A")
    page.locator(".slot[data-place='1.2']").hover()
    page.wait_for_function("() => document.querySelector('#details-title').textContent === 'Slot 1.2'")
    assert f"Group {run.group('C')}, prompt 2, of version 0" in page.locator("#details-text").inner_text()
    assert "w0, for" in page.locator("#details-members").inner_text()

    page.locator("h1").hover()
    page.locator(".slot[tabindex='0']").focus()
    here = "document.activeElement.dataset.place"
    seen: list[str] = []
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowUp", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        seen.append(page.evaluate(here))
    assert seen == ["0.2", "1.2", "1.4", "0.4", "0.1", "0.1"]
    page.keyboard.press("End")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == f"slot 0.4: Reserved, group {run.group('E')}, prompt 4, version 0"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    # The focused buffer leaves: the focus stays in the grid.
    for name in "ABCDEF":
        run.complete(name)
        run.admit(0, 1)
    run.take()
    run.publish(1)
    page.wait_for_function(f"() => {here} === '1.4'")


def test_an_archive_is_the_same_run_again(
    shown: Shown, board: Start, open_page: Open, tmp_path: Path
) -> None:
    play(shown.run, shown.see)
    file = tmp_path / "run.jsonl"
    call = "from roq.cli import main; main(prog_name='roq')"
    target = ["--redis", shown.sched.url, "--run", "test"]
    subprocess.run(
        [sys.executable, "-c", call, "events", *target, "--archive", str(file)], check=True, timeout=60
    )
    page = open_page(board("--events", file))
    await_picture(page, shown.moments[-1][1])
    assert page.locator("#live").inner_text() == "End"
    page.wait_for_selector("body[data-whole='true']", state="attached")
    # The archive's own first line is no event.
    for moment, wanted in shown.moments:
        page.locator("#slider").fill(str(moment))
        await_picture(page, wanted)


def test_reduced_motion_and_both_schemes(sched: Scheduler, board: Start, open_page: Open) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=4))
    address = board()
    page = open_page(address, reduced_motion="reduce", color_scheme="dark")
    light = open_page(address, color_scheme="light")
    run.admit(0, 6)
    run.complete("A")
    wanted = ["0 PENDING O:1 . . R:5", "1 FULL R:4 R:3 R:2 R:6"]
    for one in (page, light):
        await_picture(one, wanted)
    assert page.evaluate("flights.length") == 0
    light.wait_for_function("() => flights.length > 0")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) != light.evaluate(ground)


def test_a_trimmed_run_begins_with_a_picture_of_now(sched: Scheduler, board: Start, open_page: Open) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=4, event_log=100))
    run.admit(0, 6)
    for name in "ADC":
        run.complete(name)
        run.admit(0, 1)
    for i in range(200):
        sched.renew(f"x{i}", 0)
        sched.leave(f"x{i}")
    run.complete("E")
    run.take()
    page = open_page(board())
    await_picture(page, ["0 TRAINING T:1 T:4 T:3 T:5", "1 FULL R:7 R:8 R:2 R:6"])
    assert "Older events were trimmed" in page.locator("#origin").inner_text()
    run.complete("F")
    run.publish(1)
    await_picture(page, ["1 FULL O:6 R:8 R:2 R:7", "2 PENDING . . . ."])
    issued = sched.status().ledger.issued
    page.wait_for_function("n => document.querySelector('#issued').textContent === String(n)", arg=issued)
    assert picture(page)
    await_position(page, position(page))
