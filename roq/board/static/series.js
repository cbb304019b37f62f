// The data of the charts. It only grows; each entry has its event's position, so a replay shows only the
// entries up to its moment.

import { timeOf } from "./state.js";

export class Series {
  constructor(base, publishes) {
    this.steps = []; // one per publish
    this.takes = []; // one per batch: { position, staleness: [groups at 0, at 1, …] }, cumulative
    this.seconds = []; // { position, time, trajectories, tokens } for each second in which something completed
    this.origin = null; // time of the first event
    this.last = base; // the sums at the newest publish
    this.taken = null; // the batch in training: { time, reward }
    for (const event of publishes) this.#publish(base, event, -1, null);
  }

  // `state` is the state before the event.
  observe(state, event, position) {
    const time = timeOf(event);
    if (time > 0) this.origin ??= time;
    if (event.event === "complete") this.#complete(event, position, time);
    else if (event.event === "take") this.#take(state, event, position, time);
    else if (event.event === "publish") this.#publish(state, event, position, time);
  }

  #complete(event, position, time) {
    const second = Math.floor(time / 1000) * 1000;
    const last = this.seconds.at(-1);
    if (last && last.time >= second) {
      last.trajectories += 1;
      last.tokens += Number(event.tokens);
    } else {
      this.seconds.push({ position, time: second, trajectories: 1, tokens: Number(event.tokens) });
    }
  }

  #take(state, event, position, time) {
    const version = Number(event.version);
    const staleness = this.takes.at(-1)?.staleness.slice() ?? new Array(state.config.eta + 1).fill(0);
    const rewards = [];
    for (const number of event.groups.split(" ").map(Number)) {
      const group = state.groups.get(number);
      if (!group) continue;
      const age = version - group.v;
      staleness[age] = (staleness[age] ?? 0) + 1;
      for (const member of group.members) if (member?.state === "complete") rewards.push(Number(member.reward));
    }
    this.takes.push({ position, staleness });
    const reward = rewards.length > 0 ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    this.taken = { time, reward };
  }

  #publish(state, event, position, time) {
    const metrics = event.metrics ? JSON.parse(event.metrics) : {};
    const before = this.last;
    const passed = state.time && time ? Math.max(0, time - state.time) : 0; // since the previous event
    const workersMs = state.workersMs + passed * state.workers.size;
    const workersIdleMs = state.workersIdleMs + passed * state.idle;
    const attached = workersMs - before.workersMs;
    this.steps.push({
      position,
      version: Number(event.version),
      time: timeOf(event),
      reward: metrics["reward/mean"] ?? this.taken?.reward ?? null,
      trainS: this.taken && time ? (time - this.taken.time) / 1000 : null,
      waitS: position < 0 ? (metrics["time/wait_for_batch"] ?? null) : (state.trainerIdleMs - before.trainerIdleMs) / 1000,
      idleShare: attached > 0 ? (workersIdleMs - before.workersIdleMs) / attached : null,
      metrics,
    });
    this.last = { workersMs, workersIdleMs, trainerIdleMs: state.trainerIdleMs };
    this.taken = null;
  }

  // The entries of a list up to a position.
  static upTo(list, position) {
    let low = 0;
    let high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle].position < position) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}
