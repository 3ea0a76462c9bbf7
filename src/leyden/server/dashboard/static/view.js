// How the charts of a page are drawn: smoothed or not, by step or by time, and the range that the reader has chosen.

import { h } from "./dom.js";

export const interpolate = (xs, ys, x) => {
  const at = xs.findIndex((one) => one >= x);
  if (at <= 0) return at ? ys.at(-1) : ys[0];
  return ys[at - 1] + ((x - xs[at - 1]) / (xs[at] - xs[at - 1])) * (ys[at] - ys[at - 1]);
};

// From steps to seconds since the run was created, and back; `ends` has the times at which steps ended.
export function clockOf(ends, created) {
  const steps = ends.steps[0] === 0 ? ends.steps : [0, ...ends.steps];
  const seconds = (ends.steps[0] === 0 ? ends.values : [created, ...ends.values]).map((time) => time - created);
  return { at: (step) => interpolate(steps, seconds, step), step: (second) => interpolate(seconds, steps, second) };
}

const PACE = 10; // steps

// The seconds that a run still takes at the pace of its last steps; null if that is not known.
export function timeLeft({ steps, values }, left) {
  const from = Math.max(0, steps.length - 1 - PACE);
  const done = steps.at(-1) - steps[from];
  return done > 0 && left > 0 ? ((values.at(-1) - values[from]) / done) * left : null;
}

// The controls of a page, and what they say; `redraw` is called when that changes.
export function chartView(redraw) {
  const view = { smooth: Number(localStorage.getItem("smooth") ?? 0), byTime: localStorage.getItem("axis") === "time", range: null };
  const keep = (name, value) => {
    localStorage.setItem(name, value);
    redraw();
  };
  const reset = h("button", { type: "button", hidden: true, onclick: () => view.zoom(null) }, "Whole range");
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => {
    view.byTime = axis.value === "time";
    view.range = null;
    reset.hidden = true;
    keep("axis", axis.value);
  } }, ["step", "time"].map((name) => h("option", { value: name, selected: view.byTime === (name === "time") }, `by ${name}`)));
  const smoothing = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth, "aria-label": "Smoothing", oninput: () => {
    view.smooth = Number(smoothing.value);
    keep("smooth", view.smooth);
  } });
  view.element = h("div", { class: "filters" }, axis, h("label", {}, "smoothing", smoothing), reset, h("span", { class: "soft" }, "drag across a chart to zoom in"));
  view.zoom = (range) => {
    view.range = range && (view.byTime ? range : [Math.floor(range[0]), Math.ceil(range[1])]);
    reset.hidden = !range;
    redraw();
  };
  // The steps of a run to fetch: those in the range, and the one at each side of it.
  view.steps = (clock) => {
    if (!view.range) return {};
    const [from, to] = view.byTime ? view.range.map(clock.step) : view.range;
    return { step_from: Math.max(0, Math.floor(from)), step_to: Math.ceil(to) };
  };
  return view;
}
