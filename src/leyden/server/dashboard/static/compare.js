// Several runs on one plot, and what differs in their configurations.

import { h, replace, title } from "./dom.js";
import { follow, get, runPath } from "./data.js";
import { chart } from "./chart.js";
import { differences, flatten } from "./config.js";

export async function showCompare(main, { query, signal, go }) {
  title("Compare");
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  if (names.length < 2) throw new Error("Choose at least two runs to compare.");
  const plots = h("div", { class: "charts wide" });
  const table = h("div", { class: "scroll" });

  async function refresh() {
    const rewards = await Promise.all(names.map((name) => get(runPath(name, "/rewards"), { points: 1000 })));
    if (signal.aborted) return;
    const lines = (part, points) => rewards.map((found, index) => ({
      name: names[index], colour: index, points, steps: found[part].map((one) => one.step), values: found[part].map((one) => one.mean),
      errors: points && found[part].map((one) => one.deviation / Math.sqrt(one.count)),
    }));
    replace(plots, chart({ title: "held-out reward", lines: lines("held_out", true) }), chart({ title: "training reward", lines: lines("train", false) }));
  }

  async function configurations() {
    const found = await Promise.all(names.map((name) => get(runPath(name, "/view"))));
    const flat = found.map((run) => flatten(run.config));
    const keys = differences(flat);
    replace(table, keys.length === 0 ? h("p", { class: "soft" }, "The configurations are the same.") : h("table", { class: "list" },
      h("thead", {}, h("tr", {}, h("th", {}, "setting"), names.map((name) => h("th", {}, name)))),
      h("tbody", {}, keys.map((key) => h("tr", {}, h("td", { class: "code" }, key), flat.map((one) => h("td", { class: "code" }, one[key] ?? "–")))))));
  }

  replace(main,
    h("div", { class: "head" }, h("h1", {}, "Compare"), h("span", { class: "soft" }, names.map((name, index) => [index ? ", " : "", h("a", { href: `/runs/${encodeURIComponent(name)}` }, name)]))),
    plots, h("h2", {}, "What differs"), table);
  await Promise.all([refresh(), configurations()]);
  follow(null, refresh, signal);
}
