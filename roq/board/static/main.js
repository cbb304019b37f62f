// The page: receives messages and renders at most once per frame.

import { Charts } from "./charts.js";
import { $, setData, setText } from "./dom.js";
import { Grid } from "./grid.js";
import { drawDetails, drawEvents, drawHead, drawLedger, drawOver, drawRunning, drawWorkers } from "./panels.js";
import { Player } from "./player.js";
import { listen, steer } from "./stream.js";
import { Timeline } from "./timeline.js";

const PANELS_MS = 250; // refresh interval of text
const CHARTS_MS = 1000;
const STEP = 400; // more events than this between two frames are not animated

let run = "";
let timeline = null;
let grown = 0; // arrival of the newest event, on this machine's clock
let steered = false; // the page may control the run
let told = null; // the newest status, with the workers' reports
let looked = null; // the hovered or focused slot
let shown = -1; // the position that the grid shows
let due = false;
const written = { panels: 0, charts: 0 };

const player = new Player(() => draw(true));
const grid = new Grid($("#grid"), {
  onLook(place) {
    looked = place;
    draw(false);
    written.panels = 0;
  },
});
const charts = new Charts();

// ---- messages ------------------------------------------------------------------------------------------

listen({
  connected(on) {
    setData(document.body, "connected", String(on));
    if (!on && timeline) say("The board's server does not respond; retrying.");
    else say(null);
  },
  begin(beginning) {
    run = beginning.run;
    document.title = `${run} · roq`;
    timeline = new Timeline(beginning);
    told = null;
    shown = -1;
    grown = performance.now();
    grid.reset(beginning.config);
    player.reset(timeline, beginning.live);
    steered = beginning.control;
    $("#control").hidden = !steered;
    setText($("#origin"), beginning.picture ? "Older events were trimmed: the history starts when this page was opened." : "");
    draw(true);
  },
  events(events) {
    timeline.push(events);
    grown = performance.now();
    draw(false);
  },
  status(status) {
    told = new Map(status.workers.map((worker) => [worker.worker, worker]));
  },
  trouble(message) {
    say(message);
  },
  end() {
    setData(document.body, "whole", "true");
    draw(true);
  },
});

function say(message) {
  setText($("#trouble"), message ?? "");
  $("#trouble").hidden = message === null;
}

// ---- frames --------------------------------------------------------------------------------------------

// `all`: update the panels now instead of at their interval.
function draw(all) {
  if (all) written.panels = written.charts = 0;
  if (due) return;
  due = true;
  requestAnimationFrame(frame);
}

let before = 0;

function frame(now) {
  due = false;
  if (!timeline) return;
  player.tick(Math.min(now - before, 250));
  before = now;
  const position = player.at();
  const state = timeline.at(position);
  const seen = timeline.seen(position);
  const slots = seen === position ? state : timeline.at(seen);
  if (seen !== shown) {
    const jump = shown < 0 || Math.abs(seen - shown) > STEP;
    shown = seen;
    grid.draw(slots, !jump);
  }
  setData(document.body, "position", String(position));
  player.draw();
  const time = timeAt(state, position);
  if (now - written.panels >= PANELS_MS) {
    written.panels = now;
    drawPanels(state, slots, time, position);
  }
  if (now - written.charts >= CHARTS_MS) {
    written.charts = now;
    charts.draw(timeline.series, position, time);
  }
  if (player.playing) draw(false);
}

// The server's time at the displayed moment; when live, it advances between events.
function timeAt(state, position) {
  if (player.playing) return Math.max(player.time, state.time);
  const going = player.live && player.growing && !state.ended && position === timeline.end;
  return going ? state.time + (performance.now() - grown) : state.time;
}

// `slots`: the state that the grid shows.
function drawPanels(state, slots, time, position) {
  drawHead(state, time, run);
  drawRunning(state, time);
  drawWorkers(state, time, player.live ? told : null);
  drawLedger(state);
  drawEvents(timeline, position);
  drawOver(state, slots);
  const group = drawDetails(slots, slots === state ? time : slots.time, looked);
  $("#drop").hidden = !(steered && player.live && group?.kind === "reserved");
  $("#drop").dataset.group = group?.group ?? "";
  setData(document.body, "steers", String(steered && player.live));
  $("#pause").hidden = state.paused;
  $("#resume").hidden = !state.paused;
  $("#partial").hidden = !state.partial;
}

setInterval(() => timeline && draw(false), PANELS_MS);

// ---- control -------------------------------------------------------------------------------------------

async function act(action, body) {
  try {
    const done = await steer(action, body);
    setText($("#steered"), done ?? "");
  } catch (error) {
    setText($("#steered"), error.message);
  }
}

$("#pause").addEventListener("click", () => act("pause"));
$("#resume").addEventListener("click", () => act("resume"));
$("#drop").addEventListener("click", (event) => {
  const group = Number(event.currentTarget.dataset.group);
  if (confirm(`Drop group ${group}? Its generated tokens are lost.`)) act("drop", { group });
});
$("#workers").addEventListener("click", (event) => {
  const worker = event.target.closest(".drain")?.dataset.worker;
  if (worker && confirm(`Drain worker ${worker}? It takes no new work, finishes what it has, and exits.`)) act("drain", { worker });
});
