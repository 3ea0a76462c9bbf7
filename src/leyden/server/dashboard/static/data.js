// Fetches data, and listens for changes. A page that is hidden does not listen: browsers allow few connections to a host.

import { badge } from "./dom.js";

export const GONE = "The server has stopped, as it does when a training is done. To see its runs again: leyden serve";

export async function get(path, query) {
  const used = Object.entries(query ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = used.length ? `?${new URLSearchParams(used)}` : "";
  const reply = await fetch(path + tail, { headers: { accept: "application/json" } }).catch(() => { throw new Error(GONE); });
  if (reply.status === 401) {
    location.reload(); // shows the page that asks for a key
    await new Promise(() => {});
  }
  return answer(reply);
}

// Sends what only another key than the page's may send.
export async function post(path, key, content) {
  const headers = { accept: "application/json", "content-type": "application/json", authorization: `Bearer ${key}` };
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(content) }).catch(() => { throw new Error(GONE); }));
}

async function answer(reply) {
  const body = await reply.json();
  if (!reply.ok) throw new Error(body?.error?.message ?? `The server answered ${reply.status}.`);
  return body;
}

export function runPath(run, rest = "") {
  return `/api/runs/${encodeURIComponent(run)}${rest}`;
}

const REFRESH_MS = 500;
const PAUSES = 4;

// Calls `refresh(kinds)` when something changed: at once, at most every half second, and never twice at once. After a
// slow refresh it waits for four times as long as that took, so that watching a large run takes little of the server.
export function follow(run, refresh, signal) {
  const status = document.getElementById("live");
  let source = null;
  let waiting = new Set();
  let timer = null;
  let busy = false;
  let next = 0;

  async function flush() {
    timer = null;
    const kinds = waiting;
    waiting = new Set();
    busy = true;
    const began = performance.now();
    try {
      await refresh(kinds);
    } catch (error) {
      console.warn(error);
    } finally {
      busy = false;
      const now = performance.now();
      next = now + Math.max(REFRESH_MS, PAUSES * (now - began));
      if (waiting.size) plan();
    }
  }

  function plan() {
    if (timer === null && !busy && !signal.aborted) timer = setTimeout(flush, Math.max(0, next - performance.now()));
  }

  function show(state) {
    status.className = `live ${state}`;
    status.textContent = { on: "live", off: "reconnecting", finished: "finished", stopped: "server stopped" }[state] ?? "";
  }

  // What the page has stays on it; only the state of the runs that are done changes.
  function showEnd(runs) {
    for (const name of runs) {
      const head = run === name ? "#main .head" : `#main [data-run="${CSS.escape(name)}"]`;
      document.querySelector(`${head} .badge.running`)?.replaceWith(badge("finished"));
    }
    show(runs.length ? "finished" : "stopped");
    status.title = GONE;
  }

  function open() {
    if (source || document.hidden || signal.aborted) return;
    source = new EventSource(run ? runPath(run, "/stream") : "/api/stream");
    let lost = false;
    let ended = null;
    source.addEventListener("end", (event) => { ended = JSON.parse(event.data); });
    source.addEventListener("open", () => {
      show("on");
      status.title = "";
      ended = null;
      if (lost) {
        waiting.add("*");
        plan();
      }
      lost = false;
    });
    source.addEventListener("error", () => {
      lost = true;
      if (ended) showEnd(ended);
      else show("off");
    });
    source.addEventListener("change", (event) => {
      for (const kinds of Object.values(JSON.parse(event.data))) Object.keys(kinds).forEach((kind) => waiting.add(kind));
      plan();
    });
  }

  function close() {
    source?.close();
    source = null;
    show("");
  }

  function visible() {
    if (document.hidden) return close();
    waiting.add("*");
    plan();
    open();
  }

  open();
  document.addEventListener("visibilitychange", visible, { signal });
  signal.addEventListener("abort", () => {
    close();
    clearTimeout(timer);
  });
}

export function touched(kinds, ...prefixes) {
  return kinds.has("*") || [...kinds].some((kind) => prefixes.some((prefix) => kind.startsWith(prefix)));
}
