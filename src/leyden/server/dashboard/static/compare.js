// Several runs on one plot, and what differs in their configurations.

import { badge, h, plural, replace, title, withError } from "./dom.js";
import { follow, get, runPath } from "./data.js";
import { chart, replaceCharts } from "./chart.js";
import { flatten, settingsTable } from "./config.js";

export async function show(main, { query, signal }) {
  title("Compare");
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  if (names.length < 2) throw new Error("Choose at least two runs to compare: tick them in the list of runs.");
  const plots = h("div", { class: "charts wide" });
  const table = h("div", { class: "scroll" });
  const results = h("tbody");

  async function refresh() {
    const [rewards, cards] = await Promise.all([
      Promise.all(names.map((name) => get(runPath(name, "/rewards"), { points: 1000 }))),
      Promise.all(names.map((name) => get(runPath(name, "/card")))),
    ]);
    if (signal.aborted) return;
    replace(results, cards.map((card) => h("tr", {},
      h("td", {}, h("a", { class: "row strong", href: `/runs/${encodeURIComponent(card.id)}` }, card.id)), h("td", {}, badge(card.state)), h("td", { class: "num" }, card.step || "–"),
      h("td", { class: "num" }, withError(card.reward, card.error)), h("td", { class: "num" }, withError(card.best, card.best_error), card.best_step !== null && h("span", { class: "soft" }, ` @${card.best_step}`)),
      h("td", { class: "soft" }, card.counted ? plural(card.counted, `${card.measured} rollout`) : "–"))));
    const lines = (part, points) => rewards.map((found, index) => ({
      name: names[index], colour: index, points, steps: found[part].map((one) => one.step), values: found[part].map((one) => one.mean),
      errors: points && found[part].map((one) => one.error),
    }));
    replaceCharts(plots, [chart({ title: "held-out reward", size: "wide", lines: lines("held_out", true) }), chart({ title: "training reward", size: "wide", lines: lines("train", false) })]);
  }

  async function configurations() {
    const found = await Promise.all(names.map((name) => get(runPath(name, "/view"))));
    replace(table, settingsTable(Object.fromEntries(found.map((run, index) => [names[index], flatten(run.config)]))));
  }

  replace(main,
    h("div", { class: "head" }, h("h1", {}, "Compare")),
    h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, [["run"], ["state"], ["step", "num"], ["reward", "num"], ["best", "num"], ["of"]].map(([name, kind]) => h("th", { class: kind }, name)))), results)),
    h("h2", {}, "Rewards"), plots, h("h2", {}, "What differs"), table);
  await Promise.all([refresh(), configurations()]);
  follow(null, refresh, signal);
}
