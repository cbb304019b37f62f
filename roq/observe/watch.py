"""``roq watch``: a live terminal dashboard with controls (textual)."""

# textual's queries and reactive attributes are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, DataTable, Footer, Label, RichLog, Static

from roq.client.async_scheduler import AsyncScheduler
from roq.config import RunConfig
from roq.errors import RoqError
from roq.events.event import BEGINNING, Event
from roq.observe.words import (
    SLOT_COLUMNS,
    event_text,
    heartbeat,
    published_text,
    run_state,
    slot_cells,
    slot_signs,
    step_of,
    tokens_per_s,
    trainer_text,
    worker_doing,
    worker_error,
    worker_figure,
    worker_version,
)
from roq.text import moment, printable
from roq.types import SlotStatus, Status

__all__ = ["Watch"]

STATE_STYLE = {"READY": "bold green", "TRAINING": "bold cyan", "FULL": "bold", "PENDING": "bold yellow"}
SLOT_STYLE = {"occupied": "green", "reserved": "yellow", "training": "cyan"}
LOG_LINES = 500
RETRY_S = 5.0  # show an unreachable server on the screen after this long


class Ask(ModalScreen[bool]):
    """A confirmation dialog for an action that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        """Lay out the question and two buttons; No has the focus."""
        with Vertical(id="ask"):
            yield Label(self._question, markup=False)
            with Horizontal():
                yield Button("No (n)", id="no", variant="primary")
                yield Button(f"{self._yes} (y)", id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer by mouse or Enter."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        """Answer by key."""
        self.dismiss(answer)


class Watch(App[None]):
    """The dashboard of run ``run`` on the server at ``url``, refreshed every ``every_s`` seconds."""

    TITLE = "roq"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; background: $panel; }
    #buffers { height: auto; max-height: 40%; padding: 1 1 0 1; overflow-y: auto; }
    .title { padding: 0 1; color: $text-muted; margin-top: 1; }
    #workers { height: auto; max-height: 25%; }
    #groups { height: 1fr; min-height: 5; }
    #log { height: 1fr; min-height: 4; padding: 0 1; }
    Ask { align: center middle; }
    #ask { width: 64; height: auto; padding: 1 2; border: thick $error; background: $surface; }
    #ask Horizontal { height: auto; margin-top: 1; }
    #ask Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause/resume"),
        Binding("d", "drain", "Drain worker"),
        Binding("x", "drop", "Drop group"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, url: str, run: str, config: RunConfig, *, every_s: float = 1.0) -> None:
        super().__init__()
        self._sched = AsyncScheduler(url, run, retry_s=RETRY_S)
        self.run_name, self.run_config, self.every_s = run, config, every_s
        self.picture: Status | None = None
        self.newest: str | None = None

    def compose(self) -> ComposeResult:
        """Lay out the screen from top to bottom."""
        yield Static(id="head")
        yield Static(id="buffers")
        yield Label("workers", classes="title")
        yield DataTable[Text](id="workers", cursor_type="row", zebra_stripes=True)
        yield Label("unfinished groups, nearest first", classes="title")
        yield DataTable[Text](id="groups", cursor_type="row", zebra_stripes=True)
        yield Label("events", classes="title")
        yield RichLog(id="log", max_lines=LOG_LINES, wrap=False)
        yield Footer()

    def on_mount(self) -> None:
        """Start refreshing."""
        columns = {
            "workers": ("worker", "version", "in flight", "tokens/s", "heartbeat", "does", "last error"),
            "groups": SLOT_COLUMNS,
        }
        for name, titles in columns.items():
            self.query_one(f"#{name}", DataTable).add_columns(*titles)
        self.query_one("#groups").focus()
        self.look_on()

    @work(exclusive=True, group="look")
    async def look_on(self) -> None:
        """Refresh until the app ends."""
        while True:
            try:
                await self._look()
            except RoqError as error:
                said = Text(printable(f"run {self.run_name}: {error}"), style="bold red")
                self.query_one("#head", Static).update(said)
            await asyncio.sleep(self.every_s)

    async def on_unmount(self) -> None:
        """Close the connection."""
        await self._sched.aclose()

    # -- display --------------------------------------------------------------------------------------

    async def _look(self) -> None:
        status, slots = await self._sched.status(), await self._sched.slots()
        step = await self._sched.newest_event("publish")
        self.picture = status
        self.query_one("#head", Static).update(self._head(status, step))
        self.query_one("#buffers", Static).update(self._buffers(status, slots))
        rows = {
            worker.worker: (
                worker.worker,
                worker_version(worker),
                str(worker.claims),
                worker_figure(worker, "tokens_per_s"),
                heartbeat(worker, self.run_config),
                worker_doing(worker),
                worker_error(worker),
            )
            for worker in status.workers
        }
        self._fill("workers", rows)
        waiting = [slot for slot in slots if slot.state == "reserved"]
        self._fill("groups", {str(slot.group): slot_cells(slot) for slot in waiting})
        await self._tell_events()

    def _head(self, status: Status, step: Event | None) -> Text:
        text = Text.assemble(
            (f"run {self.run_name}", "bold"), "  ",
            (run_state(status), "bold yellow" if status.paused else "bold green"),
            f"  {step_of(status.version, self.run_config)}, η = {self.run_config.eta}, "
            f"{tokens_per_s(status.workers):,.0f} tokens/s, {status.inflight} in flight, "
            f"{status.pending} to issue\n",
            printable(f"trainer {trainer_text(status)}") + "\n",
        )  # fmt: skip
        return text.append("no step yet" if step is None else printable(published_text(step)), style="dim")

    def _buffers(self, status: Status, slots: list[SlotStatus]) -> Text:
        text, width = Text(), max(20, self.size.width - 26)
        for buffer in status.buffers:
            total = buffer.occupied + buffer.reserved + buffer.empty
            text.append(f"{buffer.buffer:>6} ").append(f"{buffer.state:<9}", STATE_STYLE[buffer.state])
            text.append(f"{buffer.occupied:>4}/{total:<4} ")
            for number, (sign, slot) in enumerate(slot_signs(buffer, slots), 1):
                text.append(sign, "dim" if slot is None else SLOT_STYLE[slot.state])
                if number % width == 0 and number < total:
                    text.append("\n" + " " * 26)
            text.append("\n")
        return text

    def _fill(self, name: str, rows: dict[str, tuple[str, ...]]) -> None:
        """Show rows by key; the cursor stays on its row while the row exists."""
        table: DataTable[Text] = self.query_one(f"#{name}", DataTable)
        selected = self._selected(name)
        table.clear()
        for key, row in rows.items():
            table.add_row(*(Text(printable(cell)) for cell in row), key=key)
        if selected in rows:
            table.move_cursor(row=list(rows).index(selected))

    def _selected(self, name: str) -> str | None:
        table: DataTable[Text] = self.query_one(f"#{name}", DataTable)
        if not table.is_valid_coordinate(table.cursor_coordinate):
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    async def _tell_events(self) -> None:
        if self.newest is None:  # only new events
            newest = await self._sched.newest_event(None)
            self.newest = BEGINNING if newest is None else newest.id
        log = self.query_one("#log", RichLog)
        while page := await self._sched.events(self.newest):
            for event in page[-LOG_LINES:]:
                log.write(Text(printable(f"{moment(event.time)[-8:]}  {event_text(event)}")))
            self.newest = page[-1].id

    # -- controls -------------------------------------------------------------------------------------

    @work
    async def _steer(self, call: Callable[[], Awaitable[object]], done: str) -> None:
        try:
            await call()
        except RoqError as error:
            self.notify(printable(str(error)), severity="error", markup=False)
        else:
            self.notify(done, markup=False)
            self.look_on()

    def action_pause(self) -> None:
        """Pause or resume admission."""
        if self.picture is None:
            return
        if self.picture.paused:
            self._steer(self._sched.resume, "resumed: new prompts are admitted")
        else:
            self._steer(self._sched.pause, "paused: no new prompts are admitted")

    def action_drain(self) -> None:
        """Drain the selected worker."""
        worker = self._selected("workers")
        if worker is None:
            self.notify("no worker is attached", severity="warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._steer(lambda: self._sched.drain(worker, "roq watch"), f"draining {worker}")

        self.push_screen(Ask(f"Drain {worker}? It finishes its work and exits.", "Drain"), answered)

    def action_drop(self) -> None:
        """Drop the selected group."""
        group = self._selected("groups")
        if group is None:
            self.notify("there is no unfinished group", severity="warning")
            return
        fate = "requeued" if self.run_config.on_drop == "requeue" else "discarded"

        def answered(yes: bool | None) -> None:
            if yes:
                self._steer(lambda: self._sched.drop(int(group), "roq watch"), f"dropped group {group}")

        self.push_screen(Ask(f"Drop group {group}? Its prompt will be {fate}.", "Drop"), answered)
