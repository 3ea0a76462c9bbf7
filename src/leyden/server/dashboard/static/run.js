// One run: its curves as they grow, and its configuration.

import { ago, badge, compact, duration, ENDINGS, fact, h, moment, replace, title, totals, whole, withError } from "./dom.js";
import { follow, get, runPath, touched } from "./data.js";
import { chart, replaceCharts } from "./chart.js";
import { chartView, clockOf, timeLeft } from "./view.js";
import { flatten, settingsTable } from "./config.js";
import { filesPanel } from "./files.js";

// Endings and their colours
const OUTCOMES = [["succeeded", 1], ["agent_error", 5], ["timeout", 2], ["no_reward", 4], ["lost", 3], ["engine_error", 6], ["cancelled", 7]];

// Charts of metrics: title, metrics by the names to show, options.
const CHARTS = [
  ["outcomes of a step", OUTCOMES.map(([ending, colour]) => [`rollouts/${ending}`, ending.replaceAll("_", " "), colour]), { stacked: true, unit: "rollouts" }],
  ["groups of a step", [["groups/flat", "flat: no gradient"], ["groups/flat_succeeded", "all succeeded alike"], ["groups/flat_failed", "all failed alike"], ["groups/dropped", "dropped"]], { zero: true }],
  ["tasks drawn by difficulty", [["tasks/chance", "chance that rewards differ"], ["tasks/informative", "groups whose rewards did"]], { zero: true, unit: "share" }],
  ["calls of a rollout", [["calls/per_rollout", "model calls"], ["calls/tool_calls_per_rollout", "tool calls"], ["held_out/calls/per_rollout", "model calls, held out"], ["held_out/calls/tool_calls_per_rollout", "tool calls, held out"]], { zero: true }],
  ["calls cut by their length limit", [["calls/cut", "training"], ["held_out/calls/cut", "held out"]], { zero: true, unit: "share" }],
  ["entropy", [["training/entropy", "mean of the sampled tokens"]], { zero: true, unit: "nats" }],
  ["KL divergence", [["training/kl_sampler_k3", "to the sampler"], ["training/kl_proximal_k3", "within the step"], ["training/kl_reference", "to the reference"]], { zero: true, unit: "nats a token" }],
  ["divergence from the starting model", [["training/kl_start", "on its own samples"]], { zero: true, unit: "nats a token" }],
  ["clipped and corrected tokens", [["training/clipped_low", "clipped low"], ["training/clipped_high", "clipped high"], ["training/corrected", "corrected"]], { zero: true, unit: "share" }],
  ["trainer and engine agree", [["training/ess_token", "effective sample size by token"], ["training/ess_call", "by call"]], { max: 1, unit: "share" }],
  ["staleness", [["staleness/mean", "mean"], ["staleness/max", "most"]], { zero: true, unit: "versions behind" }],
  ["tokens of a step", [["tokens/sampled", "sampled"], ["tokens/trained", "trained on"]], { zero: true }],
  ["rollouts that continue another one", [["branches/reward", "mean reward"], ["branches/diverged", "share that left the record"]], { zero: true }],
  ["tokens of rollouts that continue another one", [["tokens/replayed", "replayed"], ["tokens/branched", "sampled"]], { stacked: true }],
  ["tokens of the training step", [["tokens/computed", "computed"], ["tokens/saved", "saved: shared with another call"]], { stacked: true }],
  ["length", [["length/call", "of a call"], ["length/rollout", "of a rollout"]], { zero: true, unit: "tokens" }],
  ["time of a step", [["time/sampling_s", "sampling"], ["time/training_s", "training"], ["time/publishing_s", "publishing"]], { stacked: true, unit: "s" }],
  ["processor", [["machine/cores", "of the run with its agents"]], { zero: true, unit: "busy cores" }],
  ["memory", [["machine/memory_gb", "of the run with its agents"], ["machine/gpu_memory_gb", "of the GPUs"]], { zero: true, unit: "GB" }],
  ["GPUs", [["machine/gpu", "computing"]], { zero: true, max: 1, unit: "share of the time" }],
  ["gradient norm", [["training/grad_norm", "before clipping"]], { zero: true }],
  ["loss", [["training/loss", "mean of the updates"]], {}],
  ["learning rate", [["training/learning_rate", "of the optimiser"]], { zero: true }],
];
// Charts of metrics with a line for each label: prefix of the metrics, title, options.
const BY_LABEL = [
  ["length/turn/", "length of a call by turn, from 0", { zero: true, unit: "tokens" }],
  ["length/role/", "length of a call by role", { zero: true, unit: "tokens" }],
  ["advantage/turn/", "mean advantage by turn, from 0", {}],
  ["advantage/role/", "mean advantage by role", {}],
  ["reward/part/", "reward by part, without weights", {}],
  ["reward/kind/", "reward by kind of task", {}],
  ["reward/role/", "reward by role", {}],
];
const NAMES = [...new Set(CHARTS.flatMap(([, metrics]) => metrics.map(([name]) => name))), "reward/*", "held_out/*", "advantage/*", "length/*", "signals/*", "rollouts/requested", "calls/trained"];

// Charts with a line for each policy of a run that trains several: metric, title, options.
const BY_POLICY = [
  ["reward/own", "own training reward by policy", {}],
  ["training/entropy", "entropy by policy", { zero: true, unit: "nats" }],
  ["training/kl_start", "divergence from the starting model by policy", { zero: true, unit: "nats a token" }],
  ["tokens/trained", "tokens trained on by policy", { zero: true }],
];

const POINTS = 200; // of each curve: a point for every second or third pixel

export async function show(main, { params: [run], signal, go }) {
  title(run);
  const path = `/runs/${encodeURIComponent(run)}`;
  const facts = h("dl", { class: "facts" });
  const plots = h("div", { class: "charts" });
  const head = h("div", { class: "head" });
  const openStep = (purpose) => (step) => go(`${path}/rollouts?purpose=${purpose}&step_from=${step}&step_to=${step}`);

  const view = chartView(() => showCurves().catch(() => {}));
  let clock = null;
  let policies = [];
  let policy = ""; // whose metrics the charts show, if there are several
  const chooser = h("select", { "aria-label": "Policy", onchange: () => {
    policy = chooser.value;
    showCurves().catch(() => {});
  } });

  async function showFacts() {
    const [card, ends] = await Promise.all([get(runPath(run, "/card")), get(runPath(run, "/step_times"), { points: POINTS })]);
    if (signal.aborted) return;
    clock = clockOf(ends, card.created);
    if (!policies.length && Object.keys(card.policies).length > 1) {
      policies = Object.keys(card.policies);
      [policy] = policies;
      replace(chooser, policies.map((name) => h("option", { value: name }, `policy ${name}`)));
      view.element.prepend(chooser);
    }
    const left = card.state === "running" ? timeLeft(ends, card.steps - card.step) : null;
    replace(head, h("h1", {}, run), badge(card.state), h("span", { class: "soft" }, card.model ?? ""), h("span", { class: "grow" }),
      h("a", { class: "button", href: `${path}/rollouts` }, "Rollouts"));
    replace(facts,
      fact("step", card.steps ? `${card.step} / ${card.steps}` : card.step),
      fact(`${card.held_out ? "held-out reward" : "reward"}${card.counted ? ` (of ${whole(card.counted)})` : ""}`, withError(card.reward, card.error)),
      fact("best", withError(card.best, card.best_error), card.best_step !== null && h("span", { class: "soft" }, ` at step ${card.best_step}`)),
      fact("rollouts", whole(totals(card.rollouts).all)),
      fact("outcomes", ENDINGS.filter((name) => card.rollouts[name]).map((name) => h("a", { class: "count", href: `${path}/rollouts?ending=${name}` }, badge(name), ` ${whole(card.rollouts[name])}`))),
      policies.length > 1 && fact("versions", Object.entries(card.policies).map(([name, version]) => `${name} ${version}`).join(", ")),
      fact("calls", compact(card.calls)),
      fact("sampled tokens", compact(card.tokens)),
      fact("started", moment(card.created)),
      left !== null && fact("time left", `about ${duration(left)}`),
      fact("last event", ago(card.last_event)));
  }

  async function showCurves() {
    const part = { points: POINTS, ...view.steps(clock) };
    const compared = BY_POLICY.map(([metric]) => metric).join(",");
    const [found, rewards, ...each] = await Promise.all([get(runPath(run, "/series"), { names: NAMES.join(","), policy, ...part }), get(runPath(run, "/rewards"), part),
      ...policies.map((name) => get(runPath(run, "/series"), { names: compared, policy: name, ...part }))]);
    if (signal.aborted) return;
    const draw = (options) => chart({ view, clock, ...options });
    const csv = (names) => `${runPath(run, "/series.csv")}?${new URLSearchParams({ names: names.join(","), policy, points: 100000 })}`;
    const drawn = [draw(rewardChart(found, rewards, openStep("train"), csv)), draw(heldOutChart(rewards, openStep("eval"), csv))];
    for (const [metric, title, options] of policies.length > 1 ? BY_POLICY : []) {
      const lines = policies.flatMap((name, index) => each[index][metric] ? [{ name, colour: index, ...each[index][metric] }] : []);
      if (lines.length) drawn.push(draw({ title, lines, ...options, open: openStep("train") }));
    }
    const shared = drawn.length;
    for (const [name, metrics, options] of CHARTS) {
      const lines = metrics.flatMap(([metric, label, colour], index) => found[metric] ? [{ name: label, colour: colour ?? index, ...found[metric] }] : []);
      if (!lines.length) continue;
      if (options.stacked) lines.forEach((line) => { delete line.low; delete line.high; });
      drawn.push(draw({ title: name, lines, ...options, open: openStep("train"), download: csv(metrics.map(([metric]) => metric)) }));
    }
    const signals = Object.keys(found).filter((name) => name.startsWith("signals/"));
    if (signals.length) drawn.push(draw({ title: "signals", zero: true, lines: signals.map((name) => ({ name: name.slice(8), ...found[name] })), open: openStep("train"), download: csv(signals) }));
    for (const [prefix, title, options] of BY_LABEL) {
      const labels = Object.keys(found).filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
      labels.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      if (labels.length > 1) drawn.splice(shared, 0, draw({ title, lines: labels.map((label, index) => ({ name: label, colour: index, ...found[prefix + label] })), ...options, open: openStep("train"), download: csv([`${prefix}*`]) }));
    }
    replaceCharts(plots, drawn);
  }

  await showFacts();
  await showCurves();
  if (signal.aborted) return;
  replace(main, head, facts, view.element, plots, filesPanel(run), configuration(run));
  follow(run, async (kinds) => {
    await showFacts();
    if (touched(kinds, "metrics", "group.finished", "attempt.rewarded")) await showCurves();
  }, signal);
}

function rewardChart(found, rewards, open, csv) {
  const steps = rewards.train.map((one) => one.step);
  const mean = rewards.train.map((one) => one.mean);
  const line = found["reward/mean"] && !steps.length ? found["reward/mean"] : { steps, values: mean, deviation: rewards.train.map((one) => one.deviation) };
  const deviation = line.deviation;
  if (deviation) {
    line.low = line.values.map((value, index) => value - deviation[index]);
    line.high = line.values.map((value, index) => value + deviation[index]);
  }
  return { title: "training reward", lines: [{ name: "mean and sd", ...line }], open, download: csv(["reward/*"]) };
}

function heldOutChart(rewards, open, csv) {
  const points = rewards.held_out;
  const line = { name: "mean ± standard error", colour: 1, points: true, steps: points.map((one) => one.step), values: points.map((one) => one.mean), errors: points.map((one) => one.error) };
  return { title: "held-out reward", lines: [line], open, empty: "no evaluation yet", download: csv(["held_out/*"]) };
}

function configuration(run) {
  const body = h("div");
  let loaded = false;
  const details = h("details", { class: "panel", ontoggle: () => {
    if (details.open && !loaded) load();
  } }, h("summary", {}, "Configuration"), body);

  async function load() {
    loaded = true;
    const [own, cards] = await Promise.all([get(runPath(run, "/view")), get("/api/overview")]);
    const flat = flatten(own.config);
    const table = h("div", { class: "scroll" });
    const others = cards.filter((card) => card.id !== run);
    const choice = h("select", { "aria-label": "Compare with", onchange: () => list(choice.value) }, h("option", { value: "" }, "whole configuration"), others.map((card) => h("option", { value: card.id }, `what differs from ${card.id}`)));

    async function list(other) {
      const others = other ? { [other]: flatten((await get(runPath(other, "/view"))).config) } : {};
      replace(table, settingsTable({ [run]: flat, ...others }));
    }
    replace(body, others.length > 0 && choice, table);
    await list("");
  }
  return details;
}
