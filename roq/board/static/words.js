// Text for durations, numbers, slots and events.

export function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const whole = Math.floor(seconds);
  const pad = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${pad(whole % 60)}`;
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");

export function short(number) {
  if (Math.abs(number) >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (Math.abs(number) >= 1e4) return `${(number / 1e3).toFixed(0)}k`;
  return String(Math.round(number * 100) / 100);
}

export function clock(ms) {
  const date = new Date(ms);
  const pad = (number, width = 2) => String(number).padStart(width, "0");
  return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}.${pad(date.getMilliseconds(), 3)}`;
}

export const KINDS = {
  empty: { name: "Empty", letter: "" },
  reserved: { name: "Reserved", letter: "R" },
  occupied: { name: "Occupied", letter: "O" },
  training: { name: "Training", letter: "T" },
};

// A slot's label for screen readers.
export function slotText(place, group) {
  if (!group) return `slot ${place}: Empty`;
  return `slot ${place}: ${KINDS[group.kind].name}, group ${group.group}, prompt ${group.ordinal}, version ${group.v}`;
}

function movesText({ moves }) {
  if (!moves) return "";
  const said = moves.split(" ").map((one) => {
    const [group, path] = one.split(":");
    return `${group} moves to ${path.split(">")[1]}`;
  });
  const shown = said.slice(0, 4).join(", ");
  return `; ${shown}${said.length > 4 ? ` and ${said.length - 4} more` : ""}`;
}

export const sentences = {
  created: () => "run created",
  worker_joined: (e) => `worker ${e.worker} joins`,
  worker_left: (e) => `worker ${e.worker} leaves`,
  worker_lost: (e) => `worker ${e.worker} is lost`,
  draining: (e) => `worker ${e.worker} is draining`,
  trainer_joined: (e) => `trainer ${e.trainer} joins`,
  reserve: (e) => `Reserve: group ${e.group} → ${e.at} at v${e.v_traj}, by ${e.worker}`,
  issue: (e) => `group ${e.group}: members ${e.members} issued to ${e.worker}`,
  reissue: (e) => `group ${e.group}: members ${e.members} issued again, to ${e.worker}`,
  complete: (e) => `group ${e.group}: member ${e.member} complete, reward ${short(Number(e.reward))}, ${e.tokens} tokens`,
  cancelled: (e) => `group ${e.group}: members ${e.members} cancelled`,
  judging: (e) => `group ${e.group}: post-processing by ${e.worker}`,
  occupy: (e) => `Occupy: group ${e.group} → ${e.at}`,
  requeued: (e) => `group ${e.group} dropped, its prompt requeued: ${e.reason}`,
  discarded: (e) => `group ${e.group} discarded: ${e.reason}`,
  filtered: (e) => `group ${e.group} filtered: ${e.reason}`,
  dead: (e) => `group ${e.group} became a dead letter: ${e.reason}`,
  revived: (e) => `prompt ${e.ordinal} revived`,
  release: (e) => `group ${e.group}: member ${e.member} released by ${e.worker}${e.reason ? `: ${e.reason}` : ""}`,
  expired: (e) => `group ${e.group}: member ${e.member} lost: the lease of ${e.worker} expired`,
  take: (e) => `Take: batch ${e.version} goes to ${e.trainer}`,
  returned: (e) => `batch ${e.version} returns to its slots: ${e.reason}`,
  publish: (e) => `Publish: version ${e.version}`,
  checkpointed: (e) => `checkpoint ${e.version}`,
  paused: () => "paused",
  resumed: () => "resumed",
  ended: (e) => `the run has ended: ${String(e.reason).replaceAll("_", " ")}`,
  configured: (e) => `settings changed: ${e.changes}`,
  reopened: (e) => `the run continues: ${e.reason}`,
  gap: (e) => `${e.missing ?? "some"} events are missing here`,
};

export function eventText(event) {
  const say = sentences[event.event];
  return (say ? say(event) : event.event) + movesText(event);
}
