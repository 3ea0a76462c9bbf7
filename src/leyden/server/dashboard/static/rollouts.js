// The rollouts of a run: filtered, sorted and paged by the server; failures grouped by message.

import { badge, ENDINGS, h, moment, number, plain, replace, taskName, title, totals, whole } from "./dom.js";
import { follow, get, runPath, touched } from "./data.js";
import { header, showPager } from "./paging.js";

const PAGE = 50;
const COLUMNS = [["rollout", null], ["task", null], ["question", null], ["answer", null], ["for", null], ["step", "step"], ["outcome", "outcome"], ["reward", "reward"], ["calls", "calls"], ["tokens", "tokens"], ["message", null], ["finished", null]];
const NUMERIC = ["step", "reward", "calls", "tokens"];
const LESS = ["task", "question", "for", "finished"]; // not on a phone
const FIELDS = ["purpose", "ending", "role", "step_from", "step_to", "reward_from", "reward_to", "tokens_from", "tokens_to", "task", "message", "text", "sort", "offset"];

export async function show(main, { params: [run], query, signal, go }) {
  title(`${run}: rollouts`);
  const path = `/runs/${encodeURIComponent(run)}/rollouts`;
  const filter = Object.fromEntries(FIELDS.flatMap((name) => query.get(name) ? [[name, query.get(name)]] : []));
  const list = h("tbody");
  const pager = h("div", { class: "pager" });
  const problems = h("div");
  const controls = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() });

  function change(changes) {
    const next = Object.entries({ ...filter, offset: "", ...changes }).filter(([, value]) => value !== "" && value !== null);
    go(`${path}${next.length ? `?${new URLSearchParams(next)}` : ""}`, { replaced: true });
  }

  async function refresh() {
    const found = await get(runPath(run, "/search"), { ...filter, limit: PAGE });
    if (signal.aborted) return;
    replace(list, found.rollouts.length ? found.rollouts.map((one) => row(path, one, found)) : h("tr", {}, h("td", { colspan: COLUMNS.length, class: "empty" }, "No rollout matches.")));
    showPager(pager, Number(filter.offset ?? 0), PAGE, found.total, change);
  }

  // Messages are read only once somebody wants to see them: a run can have many thousands.
  const groups = h("tbody");
  const examined = h("span", { class: "soft" });
  async function showFailures() {
    if (!problems.querySelector("details")?.open) return;
    const found = await get(runPath(run, "/failures"));
    if (signal.aborted) return;
    examined.textContent = found.examined < found.total ? ` (the newest ${whole(found.examined)} read)` : "";
    replace(groups, found.groups.map((one) => h("tr", {},
      h("td", { class: "num" }, whole(one.count)), h("td", {}, badge(one.ending)),
      h("td", { class: "wrap" }, h("button", { type: "button", class: "link", onclick: () => change({ message: one.message, ending: one.ending }) }, one.message || "(no message)")),
      h("td", {}, h("a", { href: `${path}/${encodeURIComponent(one.example)}` }, "newest")))));
  }

  function countFailures(endings) {
    const { failed } = totals(endings);
    const open = problems.querySelector("details")?.open ?? Boolean(filter.message);
    replace(problems, failed > 0 && h("details", { class: "panel", open, ontoggle: showFailures }, h("summary", {}, `Failures by message: ${whole(failed)}`, examined), h("table", { class: "list" }, groups)));
  }

  async function showControls() {
    const facets = await get(runPath(run, "/facets"));
    if (signal.aborted) return;
    countFailures(facets.endings);
    const choice = (name, label, options) => h("label", {}, label, h("select", { name, onchange: (event) => change({ [name]: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: (filter[name] ?? "") === value }, text))));
    const field = (name, label) => h("label", {}, label, h("input", { name, value: filter[name] ?? "", type: "number", step: "any", onchange: (event) => change({ [name]: event.target.value.trim() }) }));
    const endings = ENDINGS.filter((name) => facets.endings[name]);
    replace(controls,
      choice("purpose", "for", [["", "all"], ...Object.entries(facets.purposes).map(([name, count]) => [name, `${name} (${whole(count)})`])]),
      choice("ending", "outcome", [["", "all"], ...endings.map((name) => [name, `${name.replaceAll("_", " ")} (${whole(facets.endings[name])})`])]),
      facets.roles.length > 0 && choice("role", "role", [["", "all"], ...facets.roles.map((name) => [name, name])]),
      h("label", {}, "text", h("input", { name: "text", class: "long", type: "search", placeholder: "in question or answer", value: filter.text ?? "", onchange: (event) => change({ text: event.target.value }) })),
      ["step", "reward", "tokens"].map((name) => h("span", { class: "range" }, field(`${name}_from`, `${name} from`), field(`${name}_to`, "to"))),
      choice("sort", "sort", [["", "newest"], ["oldest", "oldest"], ["reward", "lowest reward"], ["-reward", "highest reward"], ["-tokens", "longest"], ["tokens", "shortest"], ["-calls", "most calls"], ["-step", "latest step"], ["step", "first step"], ["outcome", "outcome"]]),
      filter.message && h("button", { type: "button", class: "chip", onclick: () => change({ message: "" }) }, `message: ${filter.message.slice(0, 40)} ✕`),
      filter.task && h("button", { type: "button", class: "chip", onclick: () => change({ task: "" }) }, `task: ${filter.task} ✕`),
      Object.keys(filter).length > 0 && h("button", { type: "button", class: "quiet", onclick: () => go(path, { replaced: true }) }, "Clear"));
  }

  const column = ([name, key]) => header(name, key, NUMERIC.includes(name) ? "num" : LESS.includes(name) ? "less" : null, filter.sort, change);
  await Promise.all([refresh(), showControls()]);
  if (signal.aborted) return;
  replace(main, h("div", { class: "head" }, h("h1", {}, "Rollouts"), h("a", { class: "soft", href: `/runs/${encodeURIComponent(run)}` }, run), h("span", { class: "grow" }), pager),
    controls, problems, h("div", { class: "scroll" }, h("table", { class: "list rollouts" }, h("thead", {}, h("tr", {}, COLUMNS.map(column))), list)));
  await showFailures();
  follow(run, async (kinds) => {
    if (touched(kinds, "rollout", "attempt", "group")) await Promise.all([refresh(), get(runPath(run, "/facets")).then((facets) => signal.aborted || countFailures(facets.endings))]).then(showFailures);
  }, signal);
}

function row(path, one, found) {
  const question = plain(found.questions[one.task] ?? "");
  const answer = plain(found.answers[one.id] ?? "");
  const state = one.outcome?.ending ?? one.state;
  return h("tr", { "data-rollout": one.id },
    h("td", {}, h("a", { class: "row code", href: `${path}/${encodeURIComponent(one.id)}` }, one.id)),
    h("td", { class: "soft clip less" }, h("a", { href: `${path}?task=${encodeURIComponent(one.task)}`, title: one.task }, taskName(one.task, question))),
    h("td", { class: "clip less", title: question }, question),
    h("td", { class: "clip", title: answer }, answer),
    h("td", { class: "soft less" }, one.purpose),
    h("td", { class: "num" }, one.step ?? "–"),
    h("td", {}, badge(state), one.attempts > 1 && h("span", { class: "soft" }, ` attempt ${one.attempts}`)),
    h("td", { class: "num" }, number(one.reward)),
    h("td", { class: "num" }, one.calls ?? "–"),
    h("td", { class: "num" }, one.tokens === null ? "–" : whole(one.tokens)),
    h("td", { class: "clip why" }, one.outcome?.message ?? ""),
    h("td", { class: "soft less" }, one.finished ? moment(one.finished).slice(5) : ""));
}
