// The panels: header, running trajectories, workers, ledger, details of a slot, newest events.

import { buffers, ledger, running } from "./state.js";
import { $, list, make, setData, setText } from "./dom.js";
import { KINDS, clock, count, duration, eventText, short } from "./words.js";

const MOST_BARS = 16;
const MOST_WORKERS = 64;
const EVENTS = 14;

const cells = (tag, number) => Array.from({ length: number }, () => make(tag));

// ---- the head ------------------------------------------------------------------------------------------

export function drawHead(state, now, run) {
  const total = state.config.total_steps ? ` of ${count(state.config.total_steps)}` : "";
  const standing = state.ended ? "ended" : state.paused ? "paused" : "running";
  setText($("#run-name"), run);
  setText($("#run-state"), standing);
  setData($("#run-state"), "state", standing);
  setText($("#version"), `${count(state.version)}${total}`);
  setText($("#eta"), String(state.config.eta));
  setText($("#batch-size"), String(state.config.batch_size));
  setText($("#trainer-text"), trainerText(state, now));
}

function trainerText(state, now) {
  if (state.training) {
    const since = state.training.since ? ` for ${duration((now - state.training.since) / 1000)}` : "";
    return `training batch ${state.training.version}${since}`;
  }
  if (state.ended) return `the run has ended: ${state.ended.replaceAll("_", " ")}`;
  const first = buffers(state).find((row) => row.buffer === state.frontier);
  if (!first) return "waits";
  if (first.state === "READY") return `batch ${first.buffer} is READY`;
  const oldest = running(state).find((one) => state.groups.get(one.group).at?.startsWith(`${first.buffer}.`));
  const which = oldest ? `; oldest: group ${oldest.group} with ${oldest.worker} for ${duration((now - oldest.since) / 1000)}` : "";
  const empty = first.cells.length - first.occupied - first.reserved;
  return `waiting for batch ${first.buffer}: ${first.occupied} complete, ${first.reserved} in progress, ${empty} empty${which}`;
}

// The caption above the grid of a run that has ended.
export function drawOver(state, slots) {
  let text = "The run has ended. Its last batch is not in this history.";
  if (slots !== state) text = slots.training ? `The run has ended. This is batch ${slots.training.version}, the last one, in training.` : "The run has ended. These were its last groups.";
  else if (state.groups.size > 0) text = "The run has ended. These groups were not trained.";
  setText($("#over"), text);
  $("#over").hidden = !state.ended;
}

// ---- running trajectories ------------------------------------------------------------------------------

export function drawRunning(state, now) {
  const all = running(state);
  const longest = Math.max(1000, now - (all[0]?.since ?? now));
  setText($("#running-count"), all.length > MOST_BARS ? `${count(all.length)}, showing the oldest ${MOST_BARS}` : count(all.length));
  list(
    $("#running"),
    all.slice(0, MOST_BARS),
    () => make("li", {}, make("span", { class: "who" }), make("span", { class: "bar" }), make("span", { class: "number" })),
    (item, one) => {
      const [who, bar, number] = item.children;
      const name = one.member === 0 ? "post" : one.member;
      setText(who, state.config.group_size > 1 || one.member === 0 ? `${one.group}.${name}` : `${one.group}`);
      bar.style.setProperty("--share", Math.max(0.005, (now - one.since) / longest));
      setText(bar, `${one.worker} · v${one.v}`);
      setText(number, duration((now - one.since) / 1000));
    },
  );
}

// ---- workers -------------------------------------------------------------------------------------------

// `told`: the workers' reports by name (live only).
export function drawWorkers(state, now, told) {
  const workers = [...state.workers.values()].slice(0, MOST_WORKERS);
  const more = state.workers.size > workers.length ? `, showing the first ${workers.length}` : "";
  setText($("#workers-count"), `${state.workers.size}${more}`);
  list(
    $("#workers tbody"),
    workers,
    () => make("tr", {}, make("th", { scope: "row" }), ...cells("td", 6), drainCell()),
    (row, worker) => {
      const said = told?.get(worker.worker);
      const info = said?.info ? readInfo(said.info) : {};
      const version = said?.version ?? worker.version;
      const rate = (worker.tokens / Math.max(1, now - worker.since)) * 1000;
      const doing = said?.error ? said.error.split("\n")[0].slice(0, 60) : worker.draining ? "draining" : String(info.doing ?? "");
      const values = [
        worker.worker,
        version === null || version === undefined ? "–" : `v${version}`,
        count(worker.claims),
        count(worker.completed),
        count(Number.isFinite(info.tokens_per_s) ? info.tokens_per_s : rate),
        duration((now - worker.since) / 1000),
        doing,
      ];
      values.forEach((value, i) => setText(row.children[i], value));
      const button = row.lastElementChild.firstElementChild;
      setData(button, "worker", worker.worker);
      button.setAttribute("aria-label", `Drain ${worker.worker}`);
      button.hidden = worker.draining;
    },
  );
}

// Visible if the page may control the run (board.css); main.js handles clicks.
function drainCell() {
  return make("td", { class: "steer" }, make("button", { type: "button", class: "drain", text: "Drain" }));
}

function readInfo(text) {
  try {
    return Object(JSON.parse(text)); // null and numbers are not objects
  } catch {
    return {}; // a custom worker's report can be any text
  }
}

// ---- prompts -------------------------------------------------------------------------------------------

export function drawLedger(state) {
  const parts = ledger(state);
  setText($("#issued"), count(parts.issued));
  for (const name of ["trained", "in_slots", "requeued", "filtered", "discarded", "dead"]) {
    setText($(`#ledger-${name} dd`), count(parts[name]));
    $(`#share-${name}`).style.setProperty("--share", parts.issued > 0 ? parts[name] / parts.issued : 0);
  }
}

// ---- a slot's details ----------------------------------------------------------------------------------

export function drawDetails(state, now, place) {
  const group = place === null ? null : groupAt(state, place);
  setText($("#details-title"), place === null ? "Slot" : `Slot ${place}`);
  const kind = group?.kind ?? "empty";
  $("#details").dataset.state = place === null ? "none" : kind;
  if (place === null || !group) {
    setText($("#details-text"), place === null ? "Point at a slot, or select one with Tab and the arrow keys." : "Empty: available for the next Reserve.");
    list($("#details-members"), [], null, null);
    return null;
  }
  const latest = group.v + state.config.eta;
  setText(
    $("#details-text"),
    `${KINDS[kind].name}. Group ${group.group}, prompt ${group.ordinal}, of version ${group.v}: ` +
      `may be trained up to batch ${latest}. Reserved ${duration((now - group.since) / 1000)} ago.`,
  );
  const members = [...group.members.entries()].filter(([, member]) => member);
  if (group.judgement) members.push(["post-processing", group.judgement]);
  list(
    $("#details-members"),
    members.slice(0, 20),
    () => make("li"),
    (item, [m, member]) => setText(item, memberText(m, member, now)),
  );
  return group;
}

function groupAt(state, place) {
  const found = state.slots.get(place);
  if (found !== undefined) return state.groups.get(found);
  const [buffer, slot] = place.split(".").map(Number);
  return state.training?.version === buffer ? (state.groups.get(state.training.groups[slot - 1]) ?? null) : null;
}

function memberText(m, member, now) {
  if (member.state === "complete") return `${m}: reward ${short(Number(member.reward))}, ${count(member.tokens)} tokens, ${member.worker ?? ""}`;
  if (member.state === "leased") return `${m}: ${member.worker}, for ${duration((now - member.since) / 1000)}`;
  return `${m}: ${member.state === "pending" ? "waits to be issued" : member.state}`;
}

// ---- events --------------------------------------------------------------------------------------------

export function drawEvents(timeline, position) {
  const rows = [];
  for (let i = position; i > timeline.first && rows.length < EVENTS; i--) rows.push(timeline.event(i));
  list(
    $("#events"),
    rows,
    () => make("li", {}, make("time"), make("span")),
    (item, event) => {
      setText(item.children[0], clock(Number(event.id.split("-")[0])));
      setText(item.children[1], eventText(event));
      setData(item, "event", event.event);
    },
  );
}
