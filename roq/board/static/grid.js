// The buffers as rows of slots. The grid updates only the differences between the state and the display;
// a group in a new slot is animated there.

import { make, setData, setText } from "./dom.js";
import { Painter } from "./paint.js";
import { buffers, parsePlace } from "./state.js";
import { KINDS, slotText } from "./words.js";

const SIZES = [60, 52, 44, 34, 26, 18]; // slot sizes in px; the largest that fits all buffers is used
const HEAD = [164, 92]; // width of a row's head: on a wide, on a narrow page
const GAP = 3;
const ROW_PAD = 8; // between rows
const SLIDE_MS = 350; // when a row is removed

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Grid {
  constructor(element, { onLook }) {
    this.element = element;
    this.onLook = onLook;
    this.painter = new Painter(element);
    this.body = make("div", { role: "presentation" });
    element.append(this.body);
    this.rows = new Map(); // buffer -> { element, badge, counts, cells, index }
    this.shown = new Map(); // group -> its place on screen
    this.focus = null; // the place that Tab focuses
    this.config = null;
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("focusin", (event) => this.#look(event, true));
    element.addEventListener("pointerover", (event) => this.#look(event, false));
    element.addEventListener("pointerleave", () => this.onLook(this.#focused()));
    new ResizeObserver(() => this.#measure()).observe(element.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.painter.restyle();
      this.#paintAll();
    });
  }

  reset(config) {
    this.config = config;
    this.body.replaceChildren();
    this.rows.clear();
    this.shown.clear();
    this.focus = null;
    this.element.setAttribute("aria-colcount", config.slots + 1);
    this.#measure();
  }

  // ---- geometry: computed, never measured ------------------------------------------------------------

  #measure() {
    if (!this.config) return;
    const { slots, eta } = this.config;
    const width = this.element.clientWidth;
    const head = HEAD[width < 560 ? 1 : 0];
    const room = Math.max(100, width - head);
    this.element.style.setProperty("--head", `${head}px`);
    const tall = Math.max(260, window.innerHeight * 0.6);
    for (this.size of SIZES) {
      this.columns = Math.max(1, Math.min(slots, Math.floor((room + GAP) / (this.size + GAP))));
      this.height = Math.max(Math.ceil(slots / this.columns) * (this.size + GAP) - GAP, 40) + ROW_PAD;
      if (this.height * (eta + 1) <= tall) break;
    }
    this.element.style.setProperty("--slot", `${this.size}px`);
    this.element.style.setProperty("--columns", this.columns);
    this.element.style.setProperty("--row", `${this.height}px`);
    // The window is eta + 1 buffers wide; while its first is in training, it counts among them.
    this.element.style.setProperty("--rows", eta + 1);
    this.painter.measure(this.columns * (this.size + GAP), (eta + 1) * this.height, this.size);
    this.#paintAll();
  }

  #point(index, slot) {
    const step = this.size + GAP;
    return [1 + ((slot - 1) % this.columns) * step, 1 + index * this.height + Math.floor((slot - 1) / this.columns) * step];
  }

  // ---- drawing ---------------------------------------------------------------------------------------

  // `animate`: the state follows directly from the displayed one.
  draw(state, animate) {
    const rows = buffers(state);
    const held = this.#focused() !== null;
    const moves = animate && !calm.matches && !document.hidden;
    const before = new Map([...this.rows].map(([buffer, row]) => [buffer, row.index]));
    const arranged = this.#arrange(rows, moves);
    const changed = [];
    const places = new Map();
    for (const row of rows) {
      row.cells.forEach((number, i) => {
        if (number !== null) places.set(number, [row.buffer, i + 1]);
      });
      this.#drawRow(state, row, changed);
    }
    if (arranged) this.#paintAll();
    for (const { row, slot, group, news } of changed) {
      const [x, y] = this.#point(row.index, slot);
      const from = this.#origin(group, before);
      const stays = from && from[0] === x && from[1] === y;
      if (!(moves && group && news && !stays && this.painter.fly(x, y, this.#looks(group), from))) {
        if (!arranged) this.painter.put(x, y, this.#looks(group));
      }
    }
    this.shown = places;
    if (this.focus === null || !this.#cell(this.focus)) this.#refocus(rows, held);
  }

  // A group's position on screen; null if it was not visible.
  #origin(group, before) {
    const place = group && this.shown.get(group.group);
    const index = place && before.get(place[0]);
    return index === undefined || !place ? null : this.#point(index, place[1]);
  }

  // Update the rows to match the state; returns whether a repaint is needed.
  #arrange(rows, moves) {
    const wanted = new Set(rows.map(({ buffer }) => buffer));
    let shift = 0;
    let arranged = false;
    for (const [buffer, row] of this.rows) {
      if (wanted.has(buffer)) continue;
      arranged = true;
      this.rows.delete(buffer);
      row.element.remove();
      if (moves) {
        row.cells.forEach(({ group }, i) => group && this.painter.leave(...this.#point(row.index, i + 1), this.#looks(group)));
      }
    }
    rows.forEach(({ buffer }, index) => {
      let row = this.rows.get(buffer);
      if (!row) {
        row = this.#makeRow(buffer);
        this.rows.set(buffer, row);
        const next = rows.slice(index + 1).find((later) => this.rows.has(later.buffer));
        this.body.insertBefore(row.element, next ? this.rows.get(next.buffer).element : null);
        arranged = true;
      } else if (row.index !== index) {
        shift = (row.index - index) * this.height;
        arranged = true;
      }
      row.index = index;
    });
    if (moves && shift !== 0) {
      const frames = [{ transform: `translateY(${shift}px)` }, { transform: "none" }];
      for (const part of [this.body, this.painter.base.canvas]) part.animate(frames, { duration: SLIDE_MS, easing: "ease-out" });
    }
    this.element.setAttribute("aria-rowcount", rows.length);
    return arranged;
  }

  #makeRow(buffer) {
    const badge = make("span", { class: "badge" });
    const counts = make("span", { class: "counts" });
    const head = make("div", { class: "row-head", role: "rowheader" });
    head.append(make("span", { class: "row-name", text: `buffer ${buffer}` }), badge, counts);
    const cells = [];
    const slots = make("div", { class: "slots", role: "presentation" });
    for (let slot = 1; slot <= this.config.slots; slot++) {
      const place = `${buffer}.${slot}`;
      const element = make("div", { class: "slot", role: "gridcell", tabindex: "-1", "aria-label": slotText(place, null) });
      element.dataset.place = place;
      element.dataset.state = "empty";
      cells.push({ element, group: null });
      slots.append(element);
    }
    const element = make("div", { class: "buffer", role: "row" }, head, slots);
    element.dataset.buffer = buffer;
    return { element, badge, counts, cells, index: 0 };
  }

  // Record changes; the cells are painted later.
  #drawRow(state, { buffer, state: name, occupied, reserved, cells }, changed) {
    const row = this.rows.get(buffer);
    setData(row.element, "state", name);
    setText(row.badge, name);
    setText(row.counts, `${occupied} + ${reserved} of ${cells.length}`);
    cells.forEach((number, i) => {
      const group = number === null ? null : (state.groups.get(number) ?? null);
      const cell = row.cells[i];
      if (cell.group === group) return; // groups are never changed in place
      const news = cell.group?.group !== group?.group;
      cell.group = group;
      const { dataset } = cell.element;
      dataset.state = group?.kind ?? "empty";
      if (group) dataset.group = number;
      else delete dataset.group;
      cell.element.setAttribute("aria-label", slotText(dataset.place, group));
      changed.push({ row, slot: i + 1, group, news });
    });
  }

  #paintAll() {
    this.painter.clear();
    for (const row of this.rows.values()) {
      row.cells.forEach(({ group }, i) => this.painter.put(...this.#point(row.index, i + 1), this.#looks(group)));
    }
  }

  #looks(group) {
    if (!group) return null;
    const complete = group.members.filter((member) => member?.state === "complete").length;
    return {
      kind: group.kind,
      letter: KINDS[group.kind].letter,
      label: String(group.group),
      version: this.size >= 44 ? `v${group.v}` : "",
      done: group.kind === "reserved" ? Math.min(1, complete / this.config.group_size) : 0,
    };
  }

  // ---- hover, focus, keyboard ------------------------------------------------------------------------

  #cell(place) {
    const [buffer, slot] = parsePlace(place);
    return this.rows.get(buffer)?.cells[slot - 1]?.element;
  }

  #focused() {
    const active = document.activeElement?.closest?.(".slot");
    return active && this.element.contains(active) ? active.dataset.place : null;
  }

  #look(event, focused) {
    const cell = event.target.closest(".slot");
    if (!cell) return;
    if (focused) this.#setFocus(cell.dataset.place);
    this.onLook(cell.dataset.place);
  }

  #setFocus(place) {
    if (this.focus) this.#cell(this.focus)?.setAttribute("tabindex", "-1");
    this.focus = place;
    this.#cell(place)?.setAttribute("tabindex", "0");
  }

  // The focused row was removed: focus the same slot in the first row.
  #refocus(rows, held) {
    if (rows.length === 0) return;
    const slot = this.focus === null ? 1 : parsePlace(this.focus)[1];
    this.#setFocus(`${rows[0].buffer}.${slot}`);
    if (held) this.#cell(this.focus).focus({ preventScroll: true });
  }

  #key(event) {
    const here = this.#focused();
    if (!here) return;
    const [buffer, slot] = parsePlace(here);
    const order = [...this.rows.keys()].sort((a, b) => a - b);
    const row = order.indexOf(buffer);
    const last = this.config.slots;
    const line = this.columns;
    let to = null;
    if (event.key === "ArrowRight") to = [row, slot + 1];
    else if (event.key === "ArrowLeft") to = [row, slot - 1];
    else if (event.key === "ArrowDown") to = slot + line <= last ? [row, slot + line] : [row + 1, ((slot - 1) % line) + 1];
    else if (event.key === "ArrowUp") {
      const lowest = Math.floor((last - 1) / line) * line;
      const above = Math.min(last, lowest + ((slot - 1) % line) + 1);
      to = slot > line ? [row, slot - line] : [row - 1, above];
    } else if (event.key === "Home") to = event.ctrlKey ? [0, 1] : [row, 1];
    else if (event.key === "End") to = event.ctrlKey ? [order.length - 1, last] : [row, last];
    if (!to) return;
    event.preventDefault();
    const target = order[to[0]] === undefined ? null : this.#cell(`${order[to[0]]}.${to[1]}`);
    target?.focus();
  }
}
