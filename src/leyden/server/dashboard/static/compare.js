// Several runs: paired differences of their evaluations, every metric on one plot, and what differs in their configurations.

import { badge, h, plural, replace, title, withError } from "./dom.js";
import { follow, get, runPath, touched } from "./data.js";
import { chart, replaceCharts } from "./chart.js";
import { chartView, clockOf } from "./view.js";
import { flatten, settingsTable } from "./config.js";

const POINTS = 300;

export async function show(main, { query, signal }) {
  title("Compare");
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  if (names.length < 2) throw new Error("Choose at least two runs to compare: tick them in the list of runs.");
  const plots = h("div", { class: "charts wide" });
  const metrics = h("div");
  const table = h("div", { class: "scroll" });
  const results = h("tbody");
  const view = chartView(() => drawCharts().catch(() => {}));
  const opened = new Set();
  let clocks = [];
  let policies = []; // of each run, those that it trains

  async function showResults() {
    const [cards, ends, differences] = await Promise.all([
      Promise.all(names.map((name) => get(runPath(name, "/card")))),
      Promise.all(names.map((name) => get(runPath(name, "/step_times"), { points: POINTS }))),
      Promise.all(names.slice(1).map((name) => get(runPath(names[0], "/comparison"), { other: name }).catch((error) => ({ error: error.message })))),
    ]);
    if (signal.aborted) return;
    policies = cards.map((card) => Object.keys(card.policies));
    clocks = ends.map((found, index) => clockOf(found, cards[index].created));
    replace(results, cards.map((card, index) => h("tr", {},
      h("td", {}, h("a", { class: "row strong", href: `/runs/${encodeURIComponent(card.id)}` }, card.id)), h("td", {}, badge(card.state)), h("td", { class: "num" }, card.step || "–"),
      h("td", { class: "num" }, withError(card.reward, card.error)), h("td", { class: "num" }, withError(card.best, card.best_error), card.best_step !== null && h("span", { class: "soft" }, ` @${card.best_step}`)),
      h("td", { class: "soft" }, card.counted ? plural(card.counted, `${card.measured} rollout`) : "–"),
      h("td", { class: "num", "data-difference": card.id }, index ? difference(differences[index - 1]) : "–"))));
  }

  async function drawCharts() {
    const parts = names.map((_, index) => ({ points: POINTS, ...view.steps(clocks[index]) }));
    // One entry for each policy of each run; of several, the policy is named.
    const each = names.flatMap((run, index) => policies[index].map((policy) => ({ run, index, policy, name: policies[index].length > 1 ? `${run}: ${policy}` : run })));
    const [rewards, series] = await Promise.all([
      Promise.all(names.map((name, index) => get(runPath(name, "/rewards"), parts[index]))),
      Promise.all(each.map(({ run, index, policy }) => get(runPath(run, "/series"), { ...parts[index], policy }))),
    ]);
    if (signal.aborted) return;
    const rewardLines = (part, points) => names.map((name, index) => {
      const found = rewards[index][part];
      return { name, colour: index, clock: clocks[index], points, steps: found.map((one) => one.step), values: found.map((one) => one.mean), errors: points && found.map((one) => one.error) };
    });
    const metricLines = (metric) => each.flatMap(({ name, index }, colour) => series[colour][metric] ? [{ name, colour, clock: clocks[index], ...series[colour][metric] }] : []);
    replaceCharts(plots, [["held-out reward", "held_out", true], ["training reward", "train", false]].map(([name, part, points]) => chart({ title: name, view, size: "wide", lines: rewardLines(part, points) })));

    // The other metrics by the first part of their names, each part drawn when it is opened.
    const known = [...new Set(series.flatMap(Object.keys))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const kinds = [...new Set(known.map((name) => name.split("/")[0]))];
    replace(metrics, kinds.map((kind) => {
      const charts = h("div", { class: "charts" });
      const draw = () => replaceCharts(charts, known.filter((name) => name.split("/")[0] === kind).map((metric) => chart({ title: metric, view, lines: metricLines(metric) })));
      const details = h("details", { class: "panel", open: opened.has(kind), ontoggle: () => {
        opened[details.open ? "add" : "delete"](kind);
        if (details.open && !charts.childElementCount) draw();
      } }, h("summary", {}, kind), charts);
      return details;
    }));
  }

  async function configurations() {
    const found = await Promise.all(names.map((name) => get(runPath(name, "/view"))));
    replace(table, settingsTable(Object.fromEntries(found.map((run, index) => [names[index], flatten(run.config)]))));
  }

  const columns = [["run"], ["state"], ["step", "num"], ["reward", "num"], ["best", "num"], ["of"], [`minus ${names[0]}, in pairs`, "num"]];
  replace(main,
    h("div", { class: "head" }, h("h1", {}, "Compare")),
    h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { class: kind }, name)))), results)),
    h("h2", {}, "Rewards"), view.element, plots, h("h2", {}, "Metrics"), metrics, h("h2", {}, "What differs"), table);
  await Promise.all([showResults().then(drawCharts), configurations()]);
  follow(null, async (kinds) => {
    if (touched(kinds, "metrics", "group.finished", "attempt.rewarded")) await showResults().then(drawCharts);
  }, signal);
}

// The last evaluation of a run minus that of the first run, over the tasks that both have.
function difference({ result, error }) {
  if (error) return h("span", { class: "soft", title: error }, "–");
  const sign = result.difference > 0 ? "+" : "";
  return [sign, withError(result.difference, result.error), h("span", { class: "soft" }, ` ${plural(result.tasks, "task")}`)];
}
