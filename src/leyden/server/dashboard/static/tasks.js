// The tasks of a run by success rate: which it cannot solve yet, which it always solves, and which teach.

import { h, number, plain, replace, taskName, title, whole } from "./dom.js";
import { follow, get, runPath, touched } from "./data.js";
import { header, showPager } from "./paging.js";

const PAGE = 50;
const COLUMNS = [["task", null, null], ["input", null, "less"], ["for", null, "less"], ["success", "success", "num"], ["reward", "reward", "num"], ["flat groups", "flat", "num"], ["groups", "groups", "num"], ["rollouts", null, "num less"], ["last step", "step", "num"]];

export async function show(main, { params: [run], query, signal, go }) {
  title(`${run}: tasks`);
  const path = `/runs/${encodeURIComponent(run)}`;
  const filter = { purpose: query.get("purpose") ?? "", sort: query.get("sort") ?? "", offset: query.get("offset") ?? "" };
  const list = h("tbody");
  const pager = h("div", { class: "pager" });

  function change(changes) {
    const next = Object.entries({ ...filter, offset: "", ...changes }).filter(([, value]) => value !== "");
    go(`${path}/tasks${next.length ? `?${new URLSearchParams(next)}` : ""}`, { replaced: true });
  }

  async function refresh() {
    const found = await get(runPath(run, "/tasks"), { ...filter, limit: PAGE });
    if (signal.aborted) return;
    replace(list, found.tasks.length ? found.tasks.map((one) => row(path, one)) : h("tr", {}, h("td", { colspan: COLUMNS.length, class: "empty" }, "No task has a rollout.")));
    showPager(pager, Number(filter.offset), PAGE, found.total, change);
  }

  const [facets] = await Promise.all([get(runPath(run, "/facets")), refresh()]);
  if (signal.aborted) return;
  const purposes = [["", "all"], ...Object.keys(facets.purposes).map((name) => [name, name])];
  const controls = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "for", h("select", { name: "purpose", onchange: (event) => change({ purpose: event.target.value }) },
      purposes.map(([value, text]) => h("option", { value, selected: filter.purpose === value }, text)))));
  replace(main, h("div", { class: "head" }, h("h1", {}, "Tasks"), h("a", { class: "soft", href: path }, run), h("span", { class: "grow" }), pager),
    controls, h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, COLUMNS.map(([name, key, style]) => header(name, key, style, filter.sort || "success", change)))), list)));
  follow(run, async (kinds) => {
    if (touched(kinds, "group", "attempt.rewarded")) await refresh();
  }, signal);
}

function row(path, one) {
  const input = plain(one.input);
  return h("tr", { "data-task": one.id },
    h("td", { class: "clip" }, h("a", { class: "row code", href: `${path}/rollouts?${new URLSearchParams({ task: one.id, purpose: one.purpose })}`, title: one.id }, taskName(one.id, input))),
    h("td", { class: "clip soft less", title: input }, input),
    h("td", { class: "soft less" }, one.purpose),
    h("td", { class: "num" }, number(one.success)),
    h("td", { class: "num" }, number(one.reward)),
    h("td", { class: "num" }, number(one.flat)),
    h("td", { class: "num" }, whole(one.groups)),
    h("td", { class: "num less" }, whole(one.rollouts)),
    h("td", { class: "num" }, one.step ?? "–"));
}
