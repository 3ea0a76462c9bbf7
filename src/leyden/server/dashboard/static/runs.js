// The list of runs.

import { ago, badge, compact, h, plural, replace, title, totals, whole, withError } from "./dom.js";
import { follow, get } from "./data.js";
import { sparkline } from "./chart.js";

const COLUMNS = [[""], ["run"], ["state"], ["model", "less"], ["step", "num"], ["reward", "num"], ["best", "num"], ["curve", "less"], ["rollouts", "num"], ["tokens", "num less"], ["age"]];

export async function show(main, { signal, go }) {
  title("Runs");
  const chosen = new Set();
  const list = h("tbody");
  const compare = h("button", { type: "button", disabled: true, onclick: () => go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) }, "Compare");
  const count = h("span", { class: "soft" });

  async function refresh() {
    const cards = await get("/api/overview");
    if (signal.aborted) return;
    count.textContent = plural(cards.length, "run");
    replace(list, cards.length ? cards.map(row) : h("tr", {}, h("td", { colspan: 11, class: "empty" }, "No runs yet: start one with leyden train.")));
  }

  function row(card) {
    const path = `/runs/${encodeURIComponent(card.id)}`;
    const { all, failed } = totals(card.rollouts);
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${card.id}`, checked: chosen.has(card.id), onchange: (event) => {
      chosen[event.target.checked ? "add" : "delete"](card.id);
      compare.disabled = chosen.size < 2;
    } });
    return h("tr", { "data-run": card.id },
      h("td", { class: "tick" }, box),
      h("td", {}, h("a", { class: "row strong", href: path }, card.id)),
      h("td", {}, badge(card.state)),
      h("td", { class: "soft clip less" }, card.model ?? "–"),
      h("td", { class: "num" }, card.steps ? `${card.step} / ${card.steps}` : card.step || "–"),
      h("td", { class: "num" }, withError(card.reward, card.error)),
      h("td", { class: "num" }, withError(card.best, card.best_error), card.best_step !== null && h("span", { class: "soft" }, ` @${card.best_step}`)),
      h("td", { class: "less" }, sparkline(card.curve)),
      h("td", { class: "num" }, h("a", { href: `${path}/rollouts` }, whole(all)), failed > 0 && h("span", { class: "bad" }, ` ${whole(failed)} failed`)),
      h("td", { class: "num soft less" }, compact(card.tokens)),
      h("td", { class: "soft", title: new Date(card.created * 1000).toLocaleString() }, card.state === "running" ? ago(card.created) : ago(card.last_event)));
  }

  replace(main,
    h("div", { class: "head" }, h("h1", {}, "Runs"), count, h("span", { class: "grow" }), compare),
    h("div", { class: "scroll" }, h("table", { class: "list" },
      h("thead", {}, h("tr", {}, COLUMNS.map(([name, kind]) => h("th", { class: kind }, name)))),
      list)),
    h("p", { class: "note" }, "Reward: mean and standard error on the held-out tasks at the last evaluation, or of the last step's rollouts where nothing is held out; of leyden dev, of all its rollouts. Rollouts that failed count with the run's failure_reward."));
  await refresh();
  follow(null, refresh, signal);
}
