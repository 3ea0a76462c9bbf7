// Line charts and stacked areas in SVG. Arrow keys move the marker of a focused chart; Enter or a click opens its step.

import { h, number, replace, svg } from "./dom.js";

const SIZES = { normal: [460, 190], wide: [680, 240] };
const NARROW = matchMedia("(max-width: 640px)"); // there a wide chart would shrink until its text cannot be read
const EDGE = { left: 46, right: 10, top: 8, bottom: 22 };
const COLOURS = 8;

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((unit) => unit * power).find((unit) => unit >= rough);
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
      low = Math.min(low, value - error, line.low?.[index] ?? value);
      high = Math.max(high, value + error, line.high?.[index] ?? value);
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

function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

const colour = (line, index) => `c${(line.colour ?? index) % COLOURS}`;

// options: title, unit, lines [{name, steps, values, low, high, errors, band, points, colour}], open(step), download, stacked, zero, max, size
export function chart(options) {
  const [width, height] = SIZES[NARROW.matches ? "normal" : options.size ?? "normal"];
  const lines = (options.stacked ? stack(options.lines) : options.lines).filter((line) => line.steps.length);
  const figure = h("figure", { class: "chart", "data-chart": options.title });
  const legend = h("figcaption", {},
    h("div", { class: "keys" }, h("span", { class: "title" }, options.title, options.unit && h("span", { class: "unit" }, `, ${options.unit}`)),
      lines.map((line, index) => h("span", { class: `key ${colour(line, index)}` }, line.name))),
    h("a", { class: "quiet", href: options.download ?? csv(lines), download: options.download ? "" : `${options.title}.csv`, title: "Data of this chart as CSV", "aria-label": `Data of ${options.title} as CSV` }, "csv"));
  if (!lines.length) {
    return replace(figure, legend, h("p", { class: "nodata" }, options.empty ?? "no data yet"));
  }
  const first = Math.min(...lines.map((line) => line.steps[0]));
  const last = Math.max(first + 1, ...lines.map((line) => line.steps.at(-1)));
  const [low, high] = extent(lines, options);
  const x = (step) => EDGE.left + ((step - first) / (last - first)) * (width - EDGE.left - EDGE.right);
  const y = (value) => height - EDGE.bottom - ((value - low) / (high - low)) * (height - EDGE.top - EDGE.bottom);
  const path = (steps, values) => steps.map((step, index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(values[index]).toFixed(1)}`).join("");
  const area = (line) => `${path(line.steps, line.high)}${path([...line.steps].reverse(), [...line.low].reverse()).replace("M", "L")}Z`;

  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "aria-label": describe(options, lines) });
  for (const value of ticks(low, high, 4)) {
    drawing.append(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      svg("text", { x: EDGE.left - 6, y: y(value) + 3, "text-anchor": "end" }, number(value, Math.min(4, Math.max(2, Math.ceil(1 - Math.log10(high - low)))))));
  }
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) {
    drawing.append(svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, String(step)));
  }
  drawing.append(svg("text", { x: EDGE.left - 12, y: height - 6, "text-anchor": "end" }, "step"));
  lines.forEach((line, index) => {
    const tone = colour(line, index);
    if (line.low?.length) drawing.append(svg("path", { class: `${options.stacked ? "stacked" : "band"} ${tone}`, d: area(line) }));
    if (!options.stacked) drawing.append(svg("path", { class: `line ${tone}`, d: path(line.steps, line.values) }));
    if (line.points || line.steps.length === 1) {
      line.steps.forEach((step, at) => {
        const error = line.errors?.[at];
        if (error) drawing.append(svg("line", { class: `whisker ${tone}`, x1: x(step), x2: x(step), y1: y(line.values[at] - error), y2: y(line.values[at] + error) }));
        drawing.append(svg("circle", { class: `point ${tone}`, cx: x(step), cy: y(line.values[at]), r: 2.6, "data-step": step }));
      });
    }
  });

  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  let at = -1;
  drawing.append(cursor);

  function mark(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const rows = lines.flatMap((line, order) => {
      const place = nearest(line.steps, step);
      if (Math.abs(line.steps[place] - step) > (last - first) / 40) return [];
      const value = (line.own ?? line.values)[place];
      const error = line.errors?.[place];
      const range = line.low?.length && !options.stacked ? ` (${number(line.low[place])} to ${number(line.high[place])})` : "";
      return [h("div", {}, h("span", { class: `key ${colour(line, order)}` }, line.name), h("b", {}, number(value) + (error ? ` ± ${number(error)}` : "")), range)];
    });
    replace(tip, h("div", { class: "step" }, `step ${step}`), rows, options.open && h("div", { class: "hint" }, "click for its rollouts"));
    tip.hidden = false;
    tip.classList.toggle("left", x(step) > width / 2);
    tip.style.left = `${(x(step) / width) * 100}%`;
  }

  function hide() {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }

  // A redraw of a live chart keeps the marker that the reader has set.
  figure.marked = () => (tip.hidden ? null : steps[at]);
  figure.mark = (step) => mark(nearest(steps, step));

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const step = first + (((event.clientX - box.left) / box.width) * width - EDGE.left) / (width - EDGE.left - EDGE.right) * (last - first);
    mark(nearest(steps, step));
  });
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("click", () => at >= 0 && options.open?.(steps[at]));
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") mark(at + 1);
    else if (event.key === "ArrowLeft") mark(at < 0 ? steps.length - 1 : at - 1);
    else if (event.key === "Enter" && at >= 0) options.open?.(steps[at]);
    else return;
    event.preventDefault();
  });
  if (options.open) drawing.classList.add("opens");
  return replace(figure, legend, h("div", { class: "plot" }, drawing, tip));
}

// The lines as CSV, for charts whose data is no single request to the server.
function csv(lines) {
  const cell = (value) => /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? "");
  const columns = lines.flatMap((line) => [[line.name, line.steps, line.own ?? line.values], ...(line.errors ? [[`${line.name}: standard error`, line.steps, line.errors]] : [])]);
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
