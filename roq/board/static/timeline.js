// All events known to the page, with periodic copies of the state for fast seeking.

import { apply, copy, initial, restore, timeOf } from "./state.js";
import { Series } from "./series.js";

export const MOST_EVENTS = 200_000; // older ones are dropped, half at a time
const EVERY = 2_000; // events between two copies

export class Timeline {
  constructor(beginning) {
    this.config = beginning.config;
    const base = beginning.picture ? restore(this.config, beginning.picture) : initial(this.config);
    this.series = new Series(base, beginning.picture?.publishes ?? []);
    this.events = [];
    this.first = 0; // the position of events[0]; positions count from the page's first event
    this.copies = [{ position: 0, state: base }]; // the state before the event at a position
    this.head = copy(base); // after all events
    this.filled = base.groups.size > 0 ? 0 : -1; // the newest position with a group in a slot or in training
    this.cursor = { position: 0, state: copy(base) }; // the state at the last position queried
  }

  // The position after all events. A position is the number of events that have happened.
  get end() {
    return this.first + this.events.length;
  }

  push(events) {
    for (const event of events) {
      this.series.observe(this.head, event, this.end);
      this.events.push(event);
      apply(this.head, event);
      if (this.head.groups.size > 0) this.filled = this.end;
      if (this.end % EVERY === 0) this.copies.push({ position: this.end, state: copy(this.head) });
    }
    if (this.events.length > MOST_EVENTS) this.#forget();
  }

  #forget() {
    const kept = this.copies.findIndex(({ position }) => position >= this.end - MOST_EVENTS / 2);
    const { position } = this.copies[kept];
    this.events.splice(0, position - this.first);
    this.copies.splice(0, kept);
    this.first = position;
  }

  // The state at a position. Owned by the timeline: do not keep or change it.
  at(position) {
    position = Math.min(Math.max(position, this.first), this.end);
    if (position === this.end) return this.head;
    if (position < this.cursor.position || position - this.cursor.position > EVERY || this.cursor.position < this.first) {
      const near = this.copies.findLast((one) => one.position <= position);
      this.cursor = { position: near.position, state: copy(near.state) };
    }
    while (this.cursor.position < position) {
      apply(this.cursor.state, this.events[this.cursor.position - this.first]);
      this.cursor.position += 1;
    }
    return this.cursor.state;
  }

  // The position to show in the grid: if the run has ended and is empty, the last non-empty one.
  seen(position) {
    const { ended, groups } = this.at(position);
    return ended && groups.size === 0 && this.filled >= this.first ? this.filled : position;
  }

  event(position) {
    return this.events[position - 1 - this.first] ?? null;
  }

  // The time of the newest event before a position.
  time(position) {
    const event = this.event(Math.max(position, this.first + 1));
    return event ? timeOf(event) : 0;
  }

  // The position after all events up to a time.
  positionOf(time) {
    let low = 0;
    let high = this.events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (timeOf(this.events[middle]) <= time) low = middle + 1;
      else high = middle;
    }
    return this.first + low;
  }
}
