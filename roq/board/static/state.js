// The state of a run after its events: a pure reducer, the same live and in a replay.
//
// Groups and workers are replaced, never changed in place, so copying the state copies only maps.

export function initial(config) {
  return {
    config,
    time: 0, // of the newest event, ms on the server's clock
    version: 0,
    frontier: 0,
    training: null, // { version, groups, since } while a batch is trained
    checkpoint: 0,
    trainer: "",
    paused: false,
    ended: null, // the reason
    partial: false, // events are missing
    issued: 0,
    trained: 0,
    filtered: 0,
    discarded: 0,
    requeued: 0,
    dead: 0,
    groups: new Map(), // number -> { group, ordinal, v, at, kind, since, members, judgement }
    slots: new Map(), // "buffer.slot" -> number
    workers: new Map(), // name -> { worker, since, version, claims, completed, tokens, draining }
    idle: 0, // workers without a claim now
    trainerIdleMs: 0, // time in which no batch was in training
    workersIdleMs: 0, // summed over workers: time without a claim
    workersMs: 0, // summed over workers: time attached
  };
}

export function copy(state) {
  return {
    ...state,
    groups: new Map(state.groups),
    slots: new Map(state.slots),
    workers: new Map(state.workers),
  };
}

export const timeOf = (event) => Number(event.id.slice(0, event.id.indexOf("-")));

export function parsePlace(place) {
  const dot = place.indexOf(".");
  return [Number(place.slice(0, dot)), Number(place.slice(dot + 1))];
}

// Start from the server's picture (roq/board/picture.py) instead of the run's creation.
export function restore(config, picture) {
  const state = initial(config);
  const { version, frontier, checkpoint, trainer, paused, issued, trained, filtered, discarded, requeued, dead } =
    picture;
  Object.assign(state, { version, frontier, checkpoint, trainer, paused });
  Object.assign(state, { issued, trained, filtered, discarded, requeued, dead });
  state.ended = picture.ended ? "ended" : null;
  for (const { worker, since, version: loaded, draining } of picture.workers) {
    state.workers.set(worker, { ...newWorker(worker, since), version: loaded, draining: draining === true });
  }
  state.idle = state.workers.size;
  for (const raw of picture.groups) {
    const members = [null, ...raw.members.map((member) => ({ ...member, since: raw.since }))];
    const judgement = raw.judgement && { ...raw.judgement, since: raw.since };
    const group = { ...raw, members, judgement };
    state.groups.set(group.group, group);
    if (group.at) state.slots.set(group.at, group.group);
    for (const member of [...members, judgement]) {
      if (member?.state === "leased") claim(state, member.worker, 1);
    }
  }
  if (picture.training.length > 0) {
    state.training = { version, groups: picture.training, since: 0 };
  }
  return state;
}

// Apply one event. Unknown events change only the time.
export function apply(state, event) {
  const time = timeOf(event);
  const passed = state.time === 0 ? 0 : Math.max(0, time - state.time);
  if (state.training === null && state.trainer !== "" && !state.ended) state.trainerIdleMs += passed;
  state.workersIdleMs += passed * state.idle;
  state.workersMs += passed * state.workers.size;
  state.time = Math.max(time, state.time);
  handlers[event.event]?.(state, event, time);
  return state;
}

// Handlers by event. A test compares the names with those the library declares.
export const handlers = {
  created() {},
  gap(state) {
    state.partial = true;
  },

  worker_joined(state, { worker }, time) {
    if (!state.workers.has(worker)) {
      state.workers.set(worker, newWorker(worker, time));
      state.idle += 1;
    }
  },
  worker_left: (state, { worker }) => leave(state, worker),
  worker_lost: (state, { worker }) => leave(state, worker),
  draining(state, { worker }) {
    change(state.workers, worker, { draining: true });
  },
  trainer_joined(state, { trainer }) {
    state.trainer = trainer;
  },

  reserve(state, event, time) {
    const ordinal = Number(event.ordinal);
    if (ordinal >= state.issued) state.issued = ordinal + 1;
    else state.requeued = Math.max(0, state.requeued - 1);
    const v = Number(event.v_traj);
    vacate(state, Number(event.group));
    const group = Number(event.group);
    put(state, { group, ordinal, v, at: null, kind: "reserved", since: time, members: [null], judgement: null });
    fill(state, group, event.at);
    change(state.workers, event.worker, { version: v });
    lease(state, event, time);
  },
  issue: lease,
  reissue: lease,
  judging(state, event, time) {
    const group = state.groups.get(Number(event.group));
    if (!group) return;
    const members = cancelled(state, group.members);
    claim(state, event.worker, 1);
    put(state, { ...group, members, judgement: { state: "leased", worker: event.worker, since: time } });
  },
  complete(state, event, time) {
    const group = state.groups.get(Number(event.group));
    const tokens = Number(event.tokens);
    const worker = state.workers.get(event.worker);
    if (worker) {
      change(state.workers, event.worker, { completed: worker.completed + 1, tokens: worker.tokens + tokens });
    }
    if (!group) return;
    const before = group.members[event.member];
    if (before?.state === "leased") claim(state, before.worker, -1);
    setMember(state, group, Number(event.member), {
      ...before,
      state: "complete",
      worker: event.worker,
      tokens,
      reward: Number(event.reward),
      until: time,
    });
  },
  release: reopen,
  expired: reopen,
  cancelled() {}, // the next event gives the group's new state

  occupy(state, event) {
    const number = Number(event.group);
    vacate(state, number);
    move(state, event);
    const group = state.groups.get(number);
    if (!group) return;
    if (group.judgement?.state === "leased") claim(state, group.judgement.worker, -1);
    const members = cancelled(state, group.members);
    put(state, { ...group, kind: "occupied", v: Number(event.v_traj), members, judgement: null });
    fill(state, number, event.at);
  },
  requeued: (state, event) => end(state, event, "requeued"),
  discarded: (state, event) => end(state, event, "discarded"),
  filtered: (state, event) => end(state, event, "filtered"),
  dead: (state, event) => end(state, event, "dead"),
  revived(state) {
    state.dead = Math.max(0, state.dead - 1);
    state.requeued += 1;
  },

  take(state, event, time) {
    move(state, event);
    const groups = event.groups.split(" ").map(Number);
    for (const number of groups) {
      vacate(state, number);
      change(state.groups, number, { kind: "training" });
    }
    const version = Number(event.version);
    state.trainer = event.trainer;
    state.training = { version, groups, since: time };
    state.frontier = version + 1;
  },
  returned(state, event) {
    event.groups.split(" ").forEach((number, i) => {
      change(state.groups, Number(number), { kind: "occupied" });
      fill(state, Number(number), `${event.version}.${i + 1}`);
    });
    state.training = null;
    state.frontier = Number(event.version);
  },
  publish(state, event) {
    state.version = Number(event.version);
    state.frontier = Math.max(state.frontier, state.version);
    state.trainer = event.trainer;
    if (state.training && state.training.version < state.version) {
      state.trained += state.training.groups.length;
      for (const number of state.training.groups) state.groups.delete(number);
      state.training = null;
    }
  },
  checkpointed(state, { version }) {
    state.checkpoint = Number(version);
  },
  paused(state) {
    state.paused = true;
  },
  resumed(state) {
    state.paused = false;
  },
  ended(state, { reason }) {
    state.ended = reason ?? "ended";
  },
  configured() {},
  reopened(state) {
    state.ended = null;
  },
};

const newWorker = (worker, since) => ({
  worker,
  since,
  version: null,
  claims: 0,
  completed: 0,
  tokens: 0,
  draining: false,
});

function change(map, key, fields) {
  const old = map.get(key);
  if (old) map.set(key, { ...old, ...fields });
}

function put(state, group) {
  state.groups.set(group.group, group);
}

function fill(state, number, place) {
  state.slots.set(place, number);
  change(state.groups, number, { at: place });
}

function vacate(state, number) {
  const group = state.groups.get(number);
  if (!group?.at) return;
  if (state.slots.get(group.at) === number) state.slots.delete(group.at);
  put(state, { ...group, at: null });
}

// Moves are written "group:from>to", in order.
function move(state, event) {
  if (!event.moves) return;
  for (const one of event.moves.split(" ")) {
    const colon = one.indexOf(":");
    const number = Number(one.slice(0, colon));
    vacate(state, number);
    if (state.groups.has(number)) fill(state, number, one.slice(one.indexOf(">") + 1));
  }
}

function claim(state, name, by) {
  const worker = state.workers.get(name);
  if (!worker) return;
  const claims = Math.max(0, worker.claims + by);
  if (worker.claims === 0 && claims > 0) state.idle -= 1;
  if (worker.claims > 0 && claims === 0) state.idle += 1;
  state.workers.set(name, { ...worker, claims });
}

function leave(state, name) {
  const worker = state.workers.get(name);
  if (!worker) return;
  if (worker.claims === 0) state.idle -= 1;
  state.workers.delete(name);
}

function setMember(state, group, m, member) {
  if (m === 0) {
    put(state, { ...group, judgement: member });
    return;
  }
  const members = group.members.slice();
  members[m] = member;
  put(state, { ...group, members });
}

function lease(state, event, time) {
  for (const m of event.members.split(",").map(Number)) {
    const group = state.groups.get(Number(event.group));
    if (!group) return;
    claim(state, event.worker, 1);
    setMember(state, group, m, { state: "leased", worker: event.worker, since: time });
  }
  change(state.groups, Number(event.group), { v: Number(event.v_traj) });
}

function reopen(state, event) {
  const group = state.groups.get(Number(event.group));
  if (!group) return;
  claim(state, event.worker, -1);
  setMember(state, group, Number(event.member), { state: "pending" });
}

// The members of a group that is complete: those still running are cancelled.
function cancelled(state, members) {
  return members.map((member) => {
    if (member?.state === "leased") claim(state, member.worker, -1);
    return member === null || member === undefined || member.state === "complete" ? member : { state: "cancelled" };
  });
}

function end(state, event, fate) {
  const number = Number(event.group);
  const group = state.groups.get(number);
  vacate(state, number);
  move(state, event);
  state[fate] += 1;
  if (!group) return;
  for (const member of [...group.members, group.judgement]) {
    if (member?.state === "leased") claim(state, member.worker, -1);
  }
  state.groups.delete(number);
}

// ---- queries -----------------------------------------------------------------------------------------

// The rows of the grid: the batch in training, then the buffers in the window.
export function buffers(state) {
  const { eta, slots, batch_size: need, total_steps: total } = state.config;
  const rows = [];
  if (state.training) {
    const cells = Array.from({ length: slots }, (_, i) => state.training.groups[i] ?? null);
    rows.push({ buffer: state.training.version, state: "TRAINING", occupied: need, reserved: 0, cells });
  }
  let last = Math.min(state.version, state.frontier + 1) + eta; // a forged event may hold any version
  if (total) last = Math.min(last, total - 1);
  for (let buffer = state.frontier; buffer <= last; buffer++) {
    const cells = [];
    let occupied = 0;
    let reserved = 0;
    for (let slot = 1; slot <= slots; slot++) {
      const group = state.groups.get(state.slots.get(`${buffer}.${slot}`));
      cells.push(group?.group ?? null);
      if (group?.kind === "occupied") occupied += 1;
      else if (group) reserved += 1;
    }
    const name = occupied >= need ? "READY" : occupied + reserved < slots ? "PENDING" : "FULL";
    rows.push({ buffer, state: name, occupied, reserved, cells });
  }
  return rows;
}

// Running trajectories, oldest first: { group, member, worker, v, since }; member 0 is post-processing.
export function running(state) {
  const found = [];
  for (const group of state.groups.values()) {
    if (group.kind !== "reserved") continue;
    group.members.forEach((member, m) => {
      if (member?.state === "leased") found.push({ group: group.group, member: m, v: group.v, ...member });
    });
    if (group.judgement?.state === "leased") found.push({ group: group.group, member: 0, v: group.v, ...group.judgement });
  }
  return found.sort((a, b) => a.since - b.since);
}

export function ledger(state) {
  const { issued, trained, requeued, filtered, discarded, dead } = state;
  return { issued, trained, in_slots: state.groups.size, requeued, filtered, discarded, dead };
}
