"""``roq watch`` in a terminal without a screen, on a real run."""

from __future__ import annotations

import asyncio

from textual.widgets import DataTable, RichLog, Static

from roq.observe.watch import Watch
from tests.protocol.play import Named
from tests.waiting import until_async


def text(app: Watch, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).content)


def cells(app: Watch, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]


async def test_the_run_is_shown_and_steered(example: Named) -> None:
    sched = example.sched
    app = Watch(sched.url, sched.run, sched.config(), every_s=0.1)
    async with app.run_test(size=(120, 40)) as pilot:
        log = app.query_one("#log", RichLog)
        await until_async(lambda: "run demo" in text(app, "head"))
        assert "running  step 1 of 9, η = 1" in text(app, "head")
        assert "reward 0.500, staleness 0.25" in text(app, "head")
        assert [line.split() for line in text(app, "buffers").splitlines()] == [
            ["1", "FULL", "2/4", "■■▨▨"],
            ["2", "FULL", "1/4", "■▨▨▨"],
        ]
        ((worker, _, claims, speed, *_),) = cells(app, "workers")
        assert (worker, claims, speed) == ("w0", "5", "12")
        assert [row[0] for row in cells(app, "groups")] == ["1.3", "1.4", "2.2", "2.3", "2.4"]

        sched.renew("own")  # a client that says nothing of itself
        await until_async(lambda: len(cells(app, "workers")) == 2)
        assert cells(app, "workers")[1][:4] == ["own", "-", "0", "-"]

        await pilot.press("p")
        await until_async(lambda: "paused" in text(app, "head"))
        assert sched.status().paused
        await pilot.press("p")
        await until_async(lambda: "running" in text(app, "head"))

        # the cursor stays with its group; dropping asks first
        await pilot.press("down")
        group = int(cells(app, "groups")[1][1])
        await pilot.press("x")
        await pilot.press("n")
        await asyncio.sleep(0.3)
        assert sched.status().ledger.requeued == 0
        await pilot.press("x")
        await pilot.press("y")
        await until_async(lambda: str(group) not in [row[1] for row in cells(app, "groups")])
        assert sched.status().ledger.requeued == 1
        await until_async(lambda: any(f"group {group}" in line.text for line in log.lines))

        await pilot.press("d")
        await pilot.press("y")
        await until_async(lambda: cells(app, "workers")[0][5] == "draining")
        assert sched.status().workers[0].draining
        await pilot.press("q")


async def test_a_refusal_is_told(example: Named) -> None:
    sched = example.sched
    app = Watch(sched.url, sched.run, sched.config(), every_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await until_async(lambda: len(cells(app, "groups")) == 5)
        group = int(cells(app, "groups")[0][1])
        sched.drop(group, "somebody was faster")
        await pilot.press("x")
        await pilot.press("y")
        await until_async(lambda: any(f"group {group} has left" in n.message for n in app._notifications))
