// The server's messages. The browser reconnects by itself, sending the last event's id; if it gives up (the
// response was not a stream), this retries.

const AGAIN_MS = 1500;

export function listen(on) {
  let last = null;
  let source = null;

  function open() {
    source = new EventSource(last === null ? "api/events" : `api/events?after=${last}`);
    source.onopen = () => on.connected(true);
    source.onerror = () => {
      on.connected(false);
      if (source.readyState === EventSource.CLOSED) setTimeout(open, AGAIN_MS);
    };
    const hear = (kind, act) =>
      source.addEventListener(kind, (message) => {
        if (message.lastEventId) last = message.lastEventId;
        act(JSON.parse(message.data));
      });
    hear("begin", on.begin);
    hear("events", on.events);
    hear("status", on.status);
    hear("trouble", ({ message }) => on.trouble(message ?? null));
    hear("end", () => {
      source.close();
      on.end();
    });
  }

  open();
}

// Send a control action; resolves to the result, rejects with the error message.
export async function steer(action, body) {
  const answer = await fetch(`api/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Roq-Board": "control" },
    body: JSON.stringify(body ?? {}),
  });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said.done;
}
