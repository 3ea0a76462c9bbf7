// Workers, engines and the queue.

import { ago, badge, compact, duration, fact, h, number, replace, title, whole } from "./dom.js";
import { follow, get } from "./data.js";

export async function show(main, { signal }) {
  title("Workers");
  const body = h("div");

  async function refresh() {
    const fleet = await get("/api/fleet");
    if (signal.aborted) return;
    const refused = Object.entries(fleet.refused);
    replace(body,
      h("dl", { class: "facts" },
        fact("queued", whole(fleet.queued), fleet.delayed > 0 && h("span", { class: "soft" }, ` ${fleet.delayed} wait for a retry`)),
        fact("running", whole(fleet.running)),
        fact("ended in ten minutes", whole(fleet.ended)),
        fact("sampled tokens a second", compact(fleet.tokens / 600)),
        refused.length > 0 && fact("refused requests", refused.map(([reason, count]) => h("span", { class: "chip warn" }, `${reason.replaceAll("_", " ")} ${whole(count)}`)))),
      h("h2", {}, "Engines"),
      fleet.engines.length ? table(["of", "policy", "engine", "version", "in use", "waiting", "calls a minute", "tokens a second", "failed", "state"], fleet.engines.map((one) => [
        one.run || h("span", { class: "soft" }, "this server"), h("b", {}, one.policy), [one.location, one.replicas.length > 0 && h("span", { class: "soft" }, ` ${one.replicas.map((running) => running ?? "down").join(" + ")}`)], one.version ?? "–",
        one.slots === null ? whole(one.running) : meter(one.running, one.slots), whole(one.waiting), whole(one.calls), one.tokens ? number(one.tokens / 60, 1) : "–",
        one.failed ? h("span", { class: "bad" }, whole(one.failed)) : "0", one.held ? badge("held") : badge("serving"),
      ])) : h("p", { class: "soft" }, "No model is served now, by this server or by a training in its home folder."),
      h("h2", {}, "Workers"),
      fleet.workers.length ? table(["worker", "last seen", "attempts now", "oldest lease", "busy cores", "memory", "ended in ten minutes"], fleet.workers.map((one) => [
        h("span", { class: "code" }, one.id), ago(one.seen), whole(one.leases), one.oldest ? duration(fleet.now - one.oldest) : "–",
        one.use ? [one.use.cores.toFixed(1), one.use.gpu !== undefined && h("span", { class: "soft" }, ` GPU ${Math.round(100 * one.use.gpu)} %`)] : "–", one.use ? `${one.use.memory_gb.toFixed(1)} GB` : "–",
        Object.entries(one.ended).map(([ending, count]) => h("span", { class: "count" }, badge(ending), ` ${whole(count)} `)),
      ])) : h("p", { class: "soft" }, "No worker was seen in the last day."),
      h("h2", {}, "Active attempts"),
      fleet.leases.length ? table(["rollout", "run", "for", "worker", "lease age"], fleet.leases.map((one) => [
        h("a", { class: "row code", href: `/runs/${encodeURIComponent(one.run)}/rollouts/${encodeURIComponent(one.rollout)}` }, one.rollout), one.run, one.purpose, h("span", { class: "code soft" }, one.worker), duration(fleet.now - one.started),
      ])) : h("p", { class: "soft" }, "Nothing runs now."));
  }

  replace(main, h("div", { class: "head" }, h("h1", {}, "Workers and engines")), body);
  await refresh();
  follow(null, refresh, signal);
  const timer = setInterval(() => document.hidden || refresh().catch(() => {}), 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function table(names, rows) {
  return h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}

function meter(value, most) {
  const full = h("span", { class: "full" });
  full.style.width = `${most ? Math.min(100, (value / most) * 100) : 0}%`;
  return h("span", { class: "meter", role: "img", "aria-label": `${value} of ${most}` }, full, h("span", {}, `${whole(value)} of ${whole(most)}`));
}
