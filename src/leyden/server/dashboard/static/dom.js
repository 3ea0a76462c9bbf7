// Builds elements. Text always becomes a text node: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

// Replaces the children. The focus stays where it was: on the new element of the same kind, target and name.
export function replace(element, ...children) {
  const focused = element.contains(document.activeElement) && element !== document.activeElement ? document.activeElement : null;
  element.replaceChildren();
  append(element, children);
  if (focused && !focused.isConnected) {
    const same = [...element.querySelectorAll(focused.tagName)].find((one) => identity(one) === identity(focused));
    same?.focus({ preventScroll: true });
  }
  return element;
}

function identity(element) {
  const chart = element.closest("[data-chart]")?.dataset.chart;
  return chart ?? JSON.stringify([element.getAttribute("href"), element.getAttribute("name") ?? element.getAttribute("aria-label") ?? element.textContent]);
}

// Numbers and times

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-9) return "0"; // rounding
  if (Number.isInteger(value) && size < 1e5) return String(value);
  if (size >= 1e5) return compact(value);
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 1 : digits);
}

// Written by hand: the browser's own formats (Intl) take tens of milliseconds when they are first used.
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

export function compact(value) {
  if (value === null || value === undefined) return "–";
  const [unit, name] = UNITS.find(([size]) => Math.abs(value) >= 0.99995 * size) ?? [1, ""]; // 999,950 is 1M, not 1000K
  return `${Math.round((value / unit) * 10) / 10}${name}`;
}

export function whole(value) {
  return value === null || value === undefined ? "–" : String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}

// A count with its noun: 1 call, 2 calls.
export function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function withError(value, error) {
  if (value === null || value === undefined) return "–";
  return Number.isFinite(error) ? [value.toFixed(3), h("span", { class: "error" }, ` ± ${error.toFixed(3)}`)] : value.toFixed(3);
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return "0 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export function moment(time) {
  const date = new Date(time * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export const ENDINGS = ["succeeded", "agent_error", "timeout", "no_reward", "lost", "engine_error", "cancelled", "running", "queued"];

export function badge(state) {
  return h("span", { class: `badge ${state}` }, state.replaceAll("_", " "));
}

// An entry of a list of facts.
export function fact(name, ...value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

// How many rollouts there are, and how many of them failed; `counts` has them by state or ending.
export function totals(counts) {
  const all = Object.values(counts).reduce((sum, one) => sum + one, 0);
  const sound = ["succeeded", "running", "queued", "interrupted"].reduce((sum, name) => sum + (counts[name] ?? 0), 0);
  return { all, failed: all - sound };
}

export function title(text) {
  document.title = `${text} · Leyden`;
}

const FIELD = /"((?:[^"\\]|\\.)*)":\s*("(?:[^"\\]|\\.)*"?|[^\s"{[][^,}\]]*)/g;

// The texts and numbers in the beginning of a JSON object, which may be cut anywhere, without its `id`; other JSON as a text.
export function plain(json) {
  const text = (value) => {
    try {
      const read = JSON.parse(value);
      return typeof read === "object" ? value : String(read);
    } catch {
      return value.replace(/^"/, "").replace(/\\n/g, " ").replace(/\\(.)/g, "$1");
    }
  };
  const fields = json.startsWith("{") ? [...json.matchAll(FIELD)].filter(([, name]) => name !== "id") : [];
  return fields.length ? fields.map(([, , value]) => text(value)).join(" · ") : text(json);
}

// The id of a task; the beginning of its input if it was given none, so that its id is a digest.
export function taskName(id, input) {
  return /^[0-9a-f]{16}$/.test(id) ? input.slice(0, 24) || id : id;
}
