// The checkpoints of a run and the ends of its logs, read whenever the panel is opened.

import { badge, compact, h, moment, replace, withError } from "./dom.js";
import { get, runPath } from "./data.js";

export function filesPanel(run) {
  const body = h("div");
  const panel = h("details", { class: "panel", ontoggle: () => panel.open && load().catch((error) => replace(body, h("p", { class: "bad" }, error.message))) }, h("summary", {}, "Checkpoints and logs"), body);

  async function load() {
    const [files, rewards] = await Promise.all([get(runPath(run, "/files")), get(runPath(run, "/rewards"), { points: 1 })]);
    const measured = new Map(rewards.held_out.map((one) => [one.step, one]));
    replace(body,
      h("p", { class: "soft code wrap" }, files.folder),
      files.checkpoints.length ? h("div", { class: "scroll" }, h("table", { class: "list" },
        h("thead", {}, h("tr", {}, ["step", "policy", "saved", "size", "held-out reward", "folder"].map((name) => h("th", {}, name)))),
        h("tbody", {}, files.checkpoints.map((one) => h("tr", { "data-checkpoint": one.step },
          h("td", {}, one.step, " ", one.best && badge("best")), h("td", {}, one.policy), h("td", {}, moment(one.saved)), h("td", {}, `${compact(one.bytes)}B`),
          h("td", {}, withError(measured.get(one.step)?.mean, measured.get(one.step)?.error)), h("td", { class: "code wrap" }, one.path)))))) : h("p", { class: "soft" }, "There is no checkpoint yet."),
      Object.entries(files.logs).map(([name, text]) => [h("h3", {}, name), h("pre", { class: "log", tabindex: "0", "aria-label": name }, text || "empty")]));
    body.querySelectorAll("pre").forEach((log) => { log.scrollTop = log.scrollHeight; });
  }
  return panel;
}
