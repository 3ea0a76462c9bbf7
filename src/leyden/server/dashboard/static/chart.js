// Line charts and stacked areas in SVG. Arrow keys move the marker of a focused chart, Enter or a click opens its step;
// a drag, + and - zoom, Escape shows the whole range again.

import { h, number, replace, svg } from "./dom.js";

const SIZES = { normal: [460, 190], wide: [680, 240] };
const NARROW = matchMedia("(max-width: 640px)"); // there a wide chart would shrink until its text cannot be read
const EDGE = { left: 46, right: 10, top: 8, bottom: 22 };
const COLOURS = 8;

const NOISE = 1e-9; // less is rounding
const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]; // seconds
const WHOLE = { smooth: 0, byTime: false, range: null };

const quiet = (values) => values?.map((value) => (Math.abs(value) < NOISE ? 0 : value));

// The exponential moving average, without the pull of the 0 that it begins with.
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function clockText(seconds) {
  const two = (part) => String(Math.floor(part)).padStart(2, "0");
  const minutes = `${two((seconds % 3600) / 60)}:${two(seconds % 60)}`;
  return seconds < 3600 ? minutes.replace(/^0/, "") : `${Math.floor(seconds / 3600)}:${minutes}`;
}

function ticks(low, high, count, units = null) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = units?.find((unit) => unit >= rough) ?? (units ? Math.ceil(rough / units.at(-1)) * units.at(-1) : [1, 2, 5, 10].map((unit) => unit * power).find((unit) => unit >= rough));
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
}

function extent(lines, options) {
  let low = Infinity;
  let high = -Infinity;
  for (const line of lines) {
    line.values.forEach((value, index) => {
      const error = line.errors?.[index] || 0;
      const around = [value - error, value + error, line.low?.[index] ?? value, line.high?.[index] ?? value, line.raw?.[index] ?? value];
      low = Math.min(low, ...around);
      high = Math.max(high, ...around);
    });
  }
  if (!Number.isFinite(low)) return [0, 1];
  if (options.zero || options.stacked) low = Math.min(0, low);
  if (options.max !== undefined) high = Math.max(high, options.max);
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-3; // less is rounding, and its ticks have no room
  if (high - low < least) return [low - least / 2, high + least / 2];
  return [low, high + (high - low) * 0.04];
}

// Adds up lines from the bottom to the top. A line that has no value at a step is 0 there.
function stack(lines) {
  const sums = new Map();
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  return lines.map((found) => {
    const known = new Map(found.steps.map((step, index) => [step, found.values[index]]));
    const line = { ...found, steps, values: steps.map((step) => known.get(step) ?? 0) };
    const low = line.steps.map((step) => sums.get(step) ?? 0);
    const values = line.values.map((value, index) => value + low[index]);
    line.steps.forEach((step, index) => sums.set(step, values[index]));
    return { ...line, own: line.values, values, low, high: values };
  });
}

function nearest(places, place) {
  let low = 0;
  let high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < place) low = middle + 1;
    else high = middle;
  }
  return low > 0 && place - places[low - 1] < places[low] - place ? low - 1 : low;
}

const LISTS = ["steps", "values", "low", "high", "errors", "own"];

// The lines as the view shows them: `places` are on the axis, points outside of its range are left out, `raw` is a
// line before it was smoothed. Points with errors and stacked areas are never smoothed.
function arrange(lines, { view, stacked, clock }) {
  return (stacked ? stack(lines) : lines).flatMap((found) => {
    const line = { ...found, values: quiet(found.values), low: quiet(found.low), high: quiet(found.high) };
    line.places = view.byTime ? line.steps.map((line.clock ?? clock).at) : line.steps;
    if (view.smooth && !stacked && !line.points) Object.assign(line, { raw: line.values, values: smoothed(line.values, view.smooth) });
    if (!view.range) return line.steps.length ? [line] : [];
    const kept = line.places.map((place) => place >= view.range[0] && place <= view.range[1]);
    for (const name of [...LISTS, "places", "raw"]) line[name] = line[name]?.filter((_, index) => kept[index]);
    return line.steps.length ? [line] : [];
  });
}

const colour = (line, index) => `c${(line.colour ?? index) % COLOURS}`;

// options: title, unit, lines [{name, steps, values, low, high, errors, points, colour, clock}], view, clock, open(step),
// download, stacked, zero, max, size
export function chart(given) {
  const options = { view: WHOLE, ...given };
  const { view } = options;
  const [width, height] = SIZES[NARROW.matches ? "normal" : options.size ?? "normal"];
  const lines = arrange(options.lines, options);
  const figure = h("figure", { class: "chart", "data-chart": options.title });
  const legend = h("figcaption", {},
    h("div", { class: "keys" }, h("span", { class: "title" }, options.title, options.unit && h("span", { class: "unit" }, `, ${options.unit}`)),
      lines.map((line, index) => h("span", { class: `key ${colour(line, index)}` }, line.name))),
    h("a", { class: "quiet", href: options.download ?? csv(lines), download: options.download ? "" : `${options.title}.csv`, title: "Data of this chart as CSV", "aria-label": `Data of ${options.title} as CSV` }, "csv"));
  if (!lines.length) {
    return replace(figure, legend, h("p", { class: "nodata" }, view.range ? "no data in this range" : options.empty ?? "no data yet"));
  }
  const first = view.range?.[0] ?? Math.min(...lines.map((line) => line.places[0]));
  const last = view.range?.[1] ?? Math.max(first + 1, ...lines.map((line) => line.places.at(-1)));
  const [low, high] = extent(lines, options);
  const x = (place) => EDGE.left + ((place - first) / (last - first)) * (width - EDGE.left - EDGE.right);
  const y = (value) => height - EDGE.bottom - ((value - low) / (high - low)) * (height - EDGE.top - EDGE.bottom);
  const path = (places, values) => places.map((place, index) => `${index ? "L" : "M"}${x(place).toFixed(1)} ${y(values[index]).toFixed(1)}`).join("");
  const area = (line) => `${path(line.places, line.high)}${path([...line.places].reverse(), [...line.low].reverse()).replace("M", "L")}Z`;

  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "aria-label": describe(options, lines) });
  for (const value of ticks(low, high, 4)) {
    drawing.append(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: EDGE.left - 6, y: y(value) + 3, "text-anchor": "end" }, number(value, Math.min(4, Math.max(2, Math.ceil(1 - Math.log10(high - low)))))));
  }
  const room = view.byTime ? EDGE.left + 14 : 0; // beside the name of the axis
  for (const place of ticks(first, last, 5, view.byTime ? DURATIONS : null).filter((one) => Number.isInteger(one) && x(one) > room)) {
    drawing.append(svg("text", { x: x(place), y: height - 6, "text-anchor": "middle" }, view.byTime ? clockText(place) : String(place)));
  }
  drawing.append(svg("text", { x: EDGE.left - 12, y: height - 6, "text-anchor": "end" }, view.byTime ? "time" : "step"));
  const drawn = new Set(); // a line over an equal one is dashed, so that both are seen
  lines.forEach((line, index) => {
    const tone = colour(line, index);
    const d = path(line.places, line.values);
    if (line.low?.length) drawing.append(svg("path", { class: `${options.stacked ? "stacked" : "band"} ${tone}`, d: area(line) }));
    if (line.raw) drawing.append(svg("path", { class: `line raw ${tone}`, d: path(line.places, line.raw) }));
    if (!options.stacked) drawing.append(svg("path", { class: `line ${tone}${drawn.has(d) ? " same" : ""}`, d }));
    drawn.add(d);
    if (line.points || line.steps.length === 1) {
      line.steps.forEach((step, at) => {
        const [error, place] = [line.errors?.[at], x(line.places[at])];
        if (error) drawing.append(svg("line", { class: `whisker ${tone}`, x1: place, x2: place, y1: y(line.values[at] - error), y2: y(line.values[at] + error) }));
        drawing.append(svg("circle", { class: `point ${tone}`, cx: place, cy: y(line.values[at]), r: 2.6, "data-step": step }));
      });
    }
  });

  const stepAt = new Map(lines.flatMap((line) => line.places.map((place, index) => [place, line.steps[index]])));
  const places = [...stepAt.keys()].sort((a, b) => a - b);
  const cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const chosen = svg("rect", { class: "chosen", y: EDGE.top, height: height - EDGE.top - EDGE.bottom, visibility: "hidden" });
  let at = -1;
  drawing.append(chosen, cursor);

  function mark(index) {
    at = Math.max(0, Math.min(places.length - 1, index));
    const place = places[at];
    cursor.setAttribute("x1", x(place));
    cursor.setAttribute("x2", x(place));
    cursor.setAttribute("visibility", "visible");
    const rows = lines.flatMap((line, order) => {
      const near = nearest(line.places, place);
      if (Math.abs(line.places[near] - place) > (last - first) / 40) return [];
      const value = (line.own ?? line.values)[near];
      const error = line.errors?.[near];
      const range = line.low?.length && !options.stacked ? ` (${number(line.low[near])} to ${number(line.high[near])})` : line.raw ? ` (${number(line.raw[near])} itself)` : "";
      return [h("div", {}, h("span", { class: `key ${colour(line, order)}` }, line.name), h("b", {}, number(value) + (error ? ` ± ${number(error)}` : "")), range)];
    });
    const where = [(!view.byTime || options.clock) && `step ${stepAt.get(place)}`, view.byTime && `after ${clockText(place)}`].filter(Boolean);
    replace(tip, h("div", { class: "step" }, where.join(", ")), rows, options.open && h("div", { class: "hint" }, "click for its rollouts"));
    tip.hidden = false;
    tip.classList.toggle("left", x(place) > width / 2);
    tip.style.left = `${(x(place) / width) * 100}%`;
  }

  function hide() {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }

  // A redraw of a live chart keeps the marker that the reader has set.
  figure.marked = () => (tip.hidden ? null : places[at]);
  figure.mark = (place) => mark(nearest(places, place));

  function placeOf(event) {
    const box = drawing.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - EDGE.left) / (width - EDGE.left - EDGE.right);
    return first + Math.max(0, Math.min(1, share)) * (last - first);
  }

  let from = null;
  drawing.addEventListener("pointerdown", (event) => { from = view.zoom && !event.button ? placeOf(event) : null; });
  drawing.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    mark(nearest(places, place));
    if (from === null) return;
    chosen.setAttribute("x", Math.min(x(from), x(place)));
    chosen.setAttribute("width", Math.abs(x(place) - x(from)));
    chosen.setAttribute("visibility", "visible");
  });
  drawing.addEventListener("pointerleave", () => {
    from = null;
    chosen.setAttribute("visibility", "hidden");
    hide();
  });
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("click", (event) => {
    const to = placeOf(event);
    const range = from === null ? null : [Math.min(from, to), Math.max(from, to)];
    from = null;
    if (range && x(range[1]) - x(range[0]) > 5) view.zoom(range);
    else if (at >= 0) options.open?.(stepAt.get(places[at]));
  });
  const zoomBy = (factor) => {
    const middle = at < 0 ? (first + last) / 2 : places[at];
    const half = Math.max(((last - first) / 2) * factor, 0.5);
    view.zoom([Math.max(0, middle - half), middle + half]);
  };
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") mark(at + 1);
    else if (event.key === "ArrowLeft") mark(at < 0 ? places.length - 1 : at - 1);
    else if (event.key === "Enter" && at >= 0) options.open?.(stepAt.get(places[at]));
    else if (view.zoom && event.key === "+") zoomBy(0.5);
    else if (view.zoom && event.key === "-") zoomBy(2);
    else if (view.range && event.key === "Escape") view.zoom(null);
    else return;
    event.preventDefault();
  });
  if (options.open) drawing.classList.add("opens");
  return replace(figure, legend, h("div", { class: "plot" }, drawing, tip));
}

// The lines as CSV, for charts whose data is no single request to the server.
function csv(lines) {
  const cell = (value) => /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? "");
  const columns = lines.flatMap((line) => [[line.name, line.steps, line.raw ?? line.own ?? line.values], ...(line.errors ? [[`${line.name}: standard error`, line.steps, line.errors]] : [])]);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const rows = [["step", ...columns.map(([name]) => name)], ...steps.map((step) => [step, ...columns.map(([, known, values]) => values[known.indexOf(step)])])];
  return `data:text/csv;charset=utf-8,${encodeURIComponent(rows.map((row) => row.map(cell).join(",")).join("\r\n"))}`;
}

function describe(options, lines) {
  const last = lines.map((line) => `${line.name} ${number((line.own ?? line.values).at(-1))}`);
  return `${options.title}: ${last.join(", ")} at step ${lines[0].steps.at(-1)}`;
}

// Draws charts in place of those that are there; keeps the marker of each.
export function replaceCharts(element, charts) {
  const marked = [...element.children].map((figure) => [figure.dataset.chart, figure.marked?.() ?? null]).filter(([, step]) => step !== null);
  replace(element, charts);
  for (const [name, step] of marked) charts.find((figure) => figure.dataset.chart === name)?.mark?.(step);
}

export function sparkline(series) {
  const { steps, values } = series;
  const drawing = svg("svg", { class: "spark", viewBox: "0 0 120 24", "aria-hidden": "true", preserveAspectRatio: "none" });
  if (steps.length < 2) return drawing;
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const width = steps.at(-1) - steps[0] || 1;
  const d = steps.map((step, index) => `${index ? "L" : "M"}${(2 + ((step - steps[0]) / width) * 116).toFixed(1)} ${(22 - ((values[index] - low) / span) * 20).toFixed(1)}`);
  drawing.append(svg("path", { d: d.join("") }));
  return drawing;
}
