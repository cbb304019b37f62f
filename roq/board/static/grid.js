// The buffers as rows of slots. The grid compares the state with what it shows and changes only that; a
// group that is found in another slot than before flies there.

import { buffers, parsePlace } from "./state.js";
import { make, setData, setText } from "./dom.js";
import { KINDS, slotText } from "./words.js";

const SIZES = [60, 52, 44, 34, 26, 18]; // of a slot, px: the largest with which all buffers fit
const HEAD = 164; // width of a row's head
const GAP = 3;
const ROW_PAD = 8; // above and below a row's slots, together
const FLY_MS = 420;
const MOST_FLIGHTS = 80; // at once; more would only be a blur

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Grid {
  constructor(element, { onLook }) {
    this.element = element;
    this.onLook = onLook;
    this.rows = new Map(); // buffer -> { element, badge, counts, cells, top, key }
    this.shown = new Map(); // group -> place, as it is on the screen
    this.flights = 0;
    this.focus = null; // the place that Tab leads to
    this.config = null;
    this.labels = (group) => String(group.group);
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("focusin", (event) => this.#look(event, true));
    element.addEventListener("pointerover", (event) => this.#look(event, false));
    element.addEventListener("pointerleave", () => this.onLook(this.#focused()));
    new ResizeObserver(() => this.#measure()).observe(element);
  }

  reset(config) {
    this.config = config;
    this.element.replaceChildren();
    this.rows.clear();
    this.shown.clear();
    this.focus = null;
    this.element.setAttribute("aria-colcount", config.slots + 1);
    this.#measure();
  }

  // ---- geometry: known, never asked of the browser ---------------------------------------------------

  #measure() {
    if (!this.config) return;
    const { slots, eta } = this.config;
    const room = Math.max(200, this.element.clientWidth - HEAD - 12);
    const tall = Math.max(260, window.innerHeight * 0.6);
    for (this.size of SIZES) {
      this.columns = Math.max(1, Math.min(slots, Math.floor((room + GAP) / (this.size + GAP))));
      this.height = Math.max(Math.ceil(slots / this.columns) * (this.size + GAP) - GAP, 40) + ROW_PAD;
      if (this.height * (eta + 2) <= tall) break;
    }
    this.element.style.setProperty("--slot", `${this.size}px`);
    this.element.style.setProperty("--columns", this.columns);
    this.element.style.setProperty("--row", `${this.height}px`);
    this.element.dataset.size = this.size >= 44 ? "large" : this.size >= 26 ? "middle" : "small";
  }

  // Where a slot is, by the tops of the rows then.
  #point(place, tops) {
    const [buffer, slot] = parsePlace(place);
    const top = tops.get(buffer);
    if (top === undefined) return null;
    const step = this.size + GAP;
    return [((slot - 1) % this.columns) * step, top + Math.floor((slot - 1) / this.columns) * step];
  }

  // ---- drawing ---------------------------------------------------------------------------------------

  // `animate`: the state follows from the one shown, event by event.
  draw(state, animate) {
    const rows = buffers(state);
    const held = this.#focused() !== null;
    const before = new Map([...this.rows].map(([buffer, row]) => [buffer, row.top]));
    const moves = animate && !calm.matches && !document.hidden;
    this.#arrange(rows, moves);
    const tops = new Map([...this.rows].map(([buffer, row]) => [buffer, row.top]));
    const places = new Map();
    for (const { buffer, cells } of rows) {
      cells.forEach((number, i) => {
        if (number !== null) places.set(number, `${buffer}.${i + 1}`);
      });
    }
    for (const row of rows) this.#drawRow(state, row, moves ? { before, tops } : null);
    this.shown = places;
    if (this.focus === null || !this.#cell(this.focus)) this.#refocus(rows, held);
  }

  #arrange(rows, moves) {
    const wanted = new Set(rows.map(({ buffer }) => buffer));
    for (const [buffer, row] of this.rows) {
      if (!wanted.has(buffer)) {
        this.rows.delete(buffer);
        this.#leave(row, moves);
      }
    }
    rows.forEach(({ buffer }, i) => {
      const top = i * this.height;
      let row = this.rows.get(buffer);
      const fresh = row === undefined;
      if (fresh) {
        row = this.#makeRow(buffer);
        this.rows.set(buffer, row);
        const next = rows.slice(i + 1).find((later) => this.rows.has(later.buffer));
        this.element.insertBefore(row.element, next ? this.rows.get(next.buffer).element : null);
      }
      if (moves && (fresh || row.top !== top)) {
        const from = fresh ? { opacity: 0 } : { transform: `translateY(${row.top - top}px)` };
        row.element.animate([from, fresh ? { opacity: 1 } : { transform: "none" }], { duration: FLY_MS, easing: "ease-out" });
      }
      row.top = top;
    });
    this.element.setAttribute("aria-rowcount", rows.length);
  }

  #leave(row, moves) {
    const { element } = row;
    if (!moves) {
      element.remove();
      return;
    }
    for (const name of ["role", "data-buffer"]) element.removeAttribute(name);
    element.classList.add("leaving");
    element.inert = true;
    element.setAttribute("aria-hidden", "true");
    element.style.top = `${row.top}px`;
    this.element.append(element);
    element
      .animate([{ opacity: 1 }, { opacity: 0, transform: "translateX(40px)" }], { duration: FLY_MS })
      .finished.finally(() => element.remove());
  }

  #makeRow(buffer) {
    const badge = make("span", { class: "badge" });
    const counts = make("span", { class: "counts" });
    const head = make("div", { class: "row-head", role: "rowheader" });
    head.append(make("span", { class: "row-name", text: `buffer ${buffer}` }), badge, counts);
    const cells = [];
    const slots = make("div", { class: "slots", role: "presentation" });
    for (let slot = 1; slot <= this.config.slots; slot++) {
      const chip = make("span", { class: "chip", "aria-hidden": "true" });
      const cell = make("div", { class: "slot", role: "gridcell", tabindex: "-1" }, chip);
      cell.dataset.place = `${buffer}.${slot}`;
      cell.setAttribute("aria-label", slotText(cell.dataset.place, null));
      cell.dataset.state = "empty";
      cells.push({ element: cell, chip, group: undefined });
      slots.append(cell);
    }
    const element = make("div", { class: "buffer", role: "row" }, head, slots);
    element.dataset.buffer = buffer;
    return { element, badge, counts, cells, top: 0 };
  }

  #drawRow(state, { buffer, state: name, occupied, reserved, cells }, motion) {
    const row = this.rows.get(buffer);
    setData(row.element, "state", name);
    setText(row.badge, name);
    setText(row.counts, `${occupied} + ${reserved} of ${cells.length}`);
    cells.forEach((number, i) => {
      const group = number === null ? null : state.groups.get(number) ?? null;
      const cell = row.cells[i];
      if (cell.group === group) return; // groups are never changed in place
      const place = cell.element.dataset.place;
      const other = (cell.group?.group ?? null) !== number;
      const kind = group?.kind ?? "empty";
      const turned = (cell.group?.kind ?? "empty") !== kind;
      cell.group = group;
      setData(cell.element, "state", kind);
      if (group) cell.element.dataset.group = number;
      else delete cell.element.dataset.group;
      cell.element.setAttribute("aria-label", slotText(place, group));
      this.#fillChip(cell.chip, group);
      if (motion && group && (other || turned)) this.#fly(cell.chip, number, place, motion, turned);
    });
  }

  #fillChip(chip, group) {
    setText(chip, group ? this.labels(group) : "");
    if (!group) return;
    setData(chip, "letter", KINDS[group.kind].letter);
    setData(chip, "version", `v${group.v}`);
    const needed = this.config.group_size;
    const complete = group.members.filter((member) => member?.state === "complete").length;
    chip.style.setProperty("--done", group.kind === "reserved" ? Math.min(1, complete / needed) : 0);
  }

  #fly(chip, number, place, { before, tops }, turned) {
    if (this.flights >= MOST_FLIGHTS) return;
    const old = this.shown.get(number);
    const from = old === undefined ? null : this.#point(old, before);
    const to = this.#point(place, tops);
    let frames;
    if (!from) {
      frames = [{ transform: "scale(0.3)", opacity: 0 }, { transform: "none", opacity: 1 }];
    } else if (from[0] !== to[0] || (from[1] !== to[1] && old !== place)) {
      const away = `translate(${from[0] - to[0]}px, ${from[1] - to[1]}px)`;
      frames = [
        { transform: away, zIndex: 3 },
        { transform: "none", zIndex: 3 },
      ];
    } else if (turned) {
      frames = [{ transform: "scale(1.25)" }, { transform: "none" }];
    } else {
      return;
    }
    this.flights += 1;
    const flight = chip.animate(frames, { duration: FLY_MS, easing: "cubic-bezier(.3,.1,.2,1)" });
    flight.onfinish = flight.oncancel = () => (this.flights -= 1);
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

  // The focused row has gone: its slot of the first row takes over.
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
