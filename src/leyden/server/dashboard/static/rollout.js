// One rollout: what happened when, the conversation with its tokens, rewards and credit, and its group.

import { badge, duration, fact, h, moment, number, plural, replace, svg, title, whole } from "./dom.js";
import { follow, get, post, runPath, touched } from "./data.js";

const SHADES = [["logprob", "logprob"], ["advantage", "advantage"], ["staleness", "staleness"], ["none", "no shading"]];

export async function show(main, { params: [run, id], query, signal }) {
  title(id);
  const path = runPath(run, `/rollouts/${encodeURIComponent(id)}/view`);
  const base = `/runs/${encodeURIComponent(run)}/rollouts`;
  let shade = localStorage.getItem("shade") ?? "logprob";
  let view = null;
  let shown = "";
  const conversation = h("div", { class: "conversation" });
  const legend = h("span", { class: "soft legend" });
  const chooser = h("select", { "aria-label": "Shade tokens by", onchange: () => {
    shade = chooser.value;
    localStorage.setItem("shade", shade);
    draw();
  } }, SHADES.map(([value, text]) => h("option", { value, selected: value === shade }, text)));
  const head = h("div");
  const trace = h("div");
  const rest = h("div");
  const branch = branching(run, base, () => view, draw);
  const panels = [sideBySide(run, base, () => view, () => shade), tree(run, () => view)];

  function draw() {
    replace(legend, LEGENDS[shade]);
    replace(conversation, view.calls.length ? view.calls.map((call, index) => showCall(view, call, index, shade, branch)) : h("p", { class: "empty" }, "The agent made no model call in this attempt."));
    panels.forEach((panel) => panel.redraw?.());
  }

  async function refresh() {
    const found = await get(path, { attempt: query.get("attempt") });
    const text = JSON.stringify(found);
    if (signal.aborted || text === shown) return;
    view = found;
    shown = text;
    const { attempt } = view;
    replace(head,
      h("div", { class: "head" }, h("h1", { class: "code" }, id), badge(attempt.outcome?.ending ?? "running"), h("span", { class: "grow" }),
        view.attempts.length > 1 && h("nav", { class: "pages", "aria-label": "Attempts" }, view.attempts.map((one) => h("a", { href: `${base}/${encodeURIComponent(id)}?attempt=${one.number}`, "aria-current": one.number === attempt.number ? "page" : null }, `attempt ${one.number}`)))),
      facts(run, view),
      attempt.outcome?.message && h("pre", { class: "panel message bad" }, attempt.outcome.message),
      siblings(base, view));
    replace(trace, waterfall(view));
    replace(rest,
      attempt.result !== null && h("section", { class: "panel" }, h("h2", {}, "Result"), h("pre", {}, pretty(attempt.result))),
      h("section", { class: "panel" }, h("h2", {}, "Task"), h("pre", {}, pretty(view.task.input))),
      view.output && h("section", { class: "panel" }, h("h2", {}, "Output"), h("pre", {}, view.output)));
    draw();
  }

  await refresh();
  if (signal.aborted) return;
  replace(main, head,
    panels[0].element,
    h("section", { class: "panel" }, h("h2", {}, "Trace"), trace),
    h("section", { class: "panel" }, h("div", { class: "head" }, h("h2", {}, "Conversation"), h("span", { class: "grow" }), legend, chooser), conversation),
    panels[1].element, rest);
  follow(run, (kinds) => touched(kinds, ...(settled(view) ? ["attempt.rewarded"] : ["attempt", "rollout", "version", "metrics"])) ? refresh() : null, signal);
  // Calls are no events: while the attempt runs, they are read every second.
  const timer = setInterval(() => document.hidden || view.attempt.ended || refresh().catch(() => {}), 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}

// Whether the group has ended and the trainer has used it: the events of a live run are then of other rollouts.
function settled(view) {
  return view.siblings.every((one) => one.outcome) && (view.trained !== null || view.rollout.purpose !== "train");
}

function facts(run, view) {
  const { rollout, attempt } = view;
  const sampled = view.calls.reduce((sum, call) => sum + call.tokens.length, 0);
  return h("dl", { class: "facts" },
    fact("reward", number(rollout.reward)),
    view.rewards.map((one) => fact(`${one.kind ?? "final"}: ${one.name ?? "reward"}`, number((one.weight ?? 1) * one.value), one.call && h("span", { class: "soft" }, ` call ${one.call}`), one.why && h("span", { class: "soft" }, ` ${one.why}`))),
    fact("for", rollout.purpose, rollout.step !== null && ` step ${rollout.step}`),
    fact("task", rollout.task),
    fact("calls", `${view.calls.length}, ${plural(sampled, "token")}`),
    fact("trained", view.trained === null ? "no" : `in step ${view.trained}`),
    fact("took", attempt.ended ? duration(attempt.ended - attempt.started) : "running"),
    fact("worker", h("span", { class: "code" }, attempt.worker)),
    fact("started", moment(attempt.started)));
}

function siblings(base, view) {
  return h("nav", { class: "siblings", "aria-label": "Rollouts of the group" }, h("span", { class: "soft" }, `group ${view.rollout.group}`),
    view.siblings.map((one) => h("a", { href: `${base}/${encodeURIComponent(one.id)}`, "aria-current": one.id === view.rollout.id ? "page" : null, class: `sibling ${one.outcome?.ending ?? one.state}`, title: `${plural(one.calls ?? 0, "call")}, ${plural(one.tokens ?? 0, "token")}` },
      h("span", { class: "soft" }, `.${one.index}`), " ", one.reward === null ? (one.outcome?.ending ?? one.state).replaceAll("_", " ") : number(one.reward))));
}

// The rollouts of the group in columns: what each did from the same task

const COLUMNS = 16;

function sideBySide(run, base, current, shading) {
  const body = h("div", { class: "columns", tabindex: "0", role: "group", "aria-label": "Rollouts of the group side by side" });
  let found = null;
  const element = h("details", { class: "panel", ontoggle: () => {
    if (element.open && found === null) load();
  } }, h("summary", {}, "Siblings side by side"), body);

  async function load() {
    const some = current().siblings.filter((one) => one.state !== "queued").slice(0, COLUMNS);
    found = await Promise.all(some.map((one) => get(runPath(run, `/rollouts/${encodeURIComponent(one.id)}/view`))));
    redraw();
  }

  function redraw() {
    if (found === null) return;
    const own = current().rollout.id;
    replace(body, found.map((view) => column(base, view, view.rollout.id === own, shading())));
  }
  return { element, redraw };
}

function column(base, view, own, shade) {
  const { rollout, attempt } = view;
  const link = h("a", { class: "code", href: `${base}/${encodeURIComponent(rollout.id)}` }, `.${rollout.index}`);
  return h("section", { class: `column${own ? " own" : ""}` },
    h("header", {}, link, badge(attempt.outcome?.ending ?? "running"), h("b", {}, number(rollout.reward)), h("span", { class: "soft" }, plural(view.calls.length, "call"))),
    view.calls.map((call, index) => h("div", { class: "answer" },
      h("span", { class: "soft" }, `${index + 1}${speaker(view, call)}${call.credit?.advantage === undefined || call.credit.advantage === null ? "" : ` · advantage ${number(call.credit.advantage)}`}`),
      h("div", { class: "text tokens" }, call.tokens.length ? call.tokens.map((token) => showToken(token, call, view, shade)) : messageText(call.response)))),
    attempt.result !== null && h("div", { class: "answer" }, h("span", { class: "soft" }, "result"), h("div", { class: "text" }, pretty(attempt.result))),
    attempt.outcome?.message && h("div", { class: "answer bad" }, attempt.outcome.message.split("\n")[0]));
}

// Trace

const MOST_SPANS = 400;

function waterfall(view) {
  const rows = [{ id: "agent", parent: null, name: `agent · attempt ${view.attempt.number}`, from: view.attempt.started, to: view.attempt.ended ?? Date.now() / 1000, kind: view.attempt.outcome && view.attempt.outcome.ending !== "succeeded" ? "error" : "agent", note: "" }];
  for (const span of view.spans) rows.push({ id: span.span_id, parent: span.parent_id, name: span.name, from: span.start_ns / 1e9, to: span.end_ns / 1e9, kind: span.status === "error" ? "error" : "span", note: span.status_message ?? "" });
  for (const call of view.calls) rows.push({ id: `call ${call.id}`, parent: call.span, name: `model${speaker(view, call)} · ${plural(call.tokens.length, "token")}`, from: call.started, to: call.ended, kind: call.status === "ok" ? "call" : "error", note: call.finish, target: call.id });
  const known = new Map(rows.map((row) => [row.id, row]));
  const children = new Map();
  for (const row of rows) {
    const parent = row.id === "agent" ? null : known.has(row.parent) && row.parent !== row.id ? row.parent : "agent";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(row);
  }
  const ordered = [];
  const seen = new Set();
  function visit(row, depth) {
    if (seen.has(row.id) || ordered.length >= MOST_SPANS) return;
    seen.add(row.id);
    ordered.push({ ...row, depth });
    (children.get(row.id) ?? []).sort((a, b) => a.from - b.from).forEach((child) => visit(child, depth + 1));
  }
  (children.get(null) ?? []).sort((a, b) => a.from - b.from).forEach((row) => visit(row, 0));
  rows.forEach((row) => visit(row, 0));
  const start = rows.reduce((least, row) => Math.min(least, row.from), view.attempt.started);
  const end = rows.reduce((most, row) => Math.max(most, row.to), start + 1e-6);
  const share = (time) => `${((time - start) / (end - start)) * 100}%`;
  return h("div", { class: "waterfall" }, ordered.map((row) => h("div", { class: "bar-row", title: row.note },
    h("span", { class: "name", style: { paddingLeft: `${Math.min(row.depth, 12) * 12}px` } }, row.target ? h("a", { href: `#call-${row.target}` }, row.name) : row.name),
    h("span", { class: "track" }, h("span", { class: `span ${row.kind}`, style: { left: share(row.from), width: `max(2px, ${((row.to - row.from) / (end - start)) * 100}%)` } })),
    h("span", { class: "num soft" }, duration(row.to - row.from)))),
  rows.length > ordered.length && h("p", { class: "soft" }, `${whole(rows.length - ordered.length)} more spans are not drawn.`));
}

// Whose call it was: the role, and the policy if there are several.
function speaker(view, call) {
  return [...new Set([view.several && call.policy, call.role])].filter(Boolean).map((name) => ` · ${name}`).join("");
}

// Conversation

const LEGENDS = {
  logprob: ["sure ", h("i", { class: "scale logprob" }), " unlikely"],
  advantage: ["worse ", h("i", { class: "scale advantage" }), " better than the group"],
  staleness: ["newest weights ", h("i", { class: "scale logprob" }), " old"],
  none: [],
};

function showCall(view, call, index, shade, branch) {
  const rewards = view.rewards.filter((one) => one.call === call.id);
  const signals = view.signals.filter((one) => one.call === call.id);
  const { credit } = call;
  return h("article", { class: "call", id: `call-${call.id}` },
    h("header", {}, h("b", {}, `call ${index + 1}`), view.several && h("span", { class: "policy" }, call.policy), call.role && !(view.several && call.role === call.policy) && h("span", { class: "role" }, call.role),
      h("span", { class: "soft" }, `${whole(call.prompt_tokens)} + ${whole(call.tokens.length)} tokens, ${call.prompt_origin}${call.origin_reason ? ` (${call.origin_reason})` : ""}, ${call.finish}, ${duration(call.ended - call.started)}`),
      credit && (credit.excluded ? h("span", { class: "chip warn" }, `left out: ${credit.excluded}`) : h("span", { class: `chip ${credit.advantage > 0 ? "good" : credit.advantage < 0 ? "bad" : ""}` }, `value ${number(credit.value)}, advantage ${number(credit.advantage)}, weight ${number(credit.weight)}, ${plural(credit.tokens, "token")}`)),
      untrained(call),
      !credit && call.untrainable && h("span", { class: "chip warn" }, `not trained on: ${call.untrainable}`),
      rewards.map((one) => h("span", { class: `chip ${one.value > 0 ? "good" : "bad"}`, title: one.why ?? "" }, `${one.name ?? "reward"} ${number((one.weight ?? 1) * one.value)}`)),
      signals.map((one) => h("span", { class: "chip", title: one.why }, `${one.kind.replaceAll("_", " ")}${one.tool ? `: ${one.tool}` : ""}`)),
      branch.button(call, index + 1)),
    branch.panel(call),
    call.kept_messages > 0 && h("p", { class: "soft kept" }, `continues after ${plural(call.kept_messages, "message")}`),
    call.messages.map((message) => showMessage(message)),
    h("div", { class: "message assistant" }, h("span", { class: "who" }, "assistant"), h("div", { class: "text tokens" }, call.tokens.length ? call.tokens.map((token) => showToken(token, call, view, shade)) : messageText(call.response))),
    call.prompt !== null && h("details", { class: "exact" }, h("summary", {}, "new prompt tokens as the model saw them"), h("pre", {}, call.prompt)));
}

// Branching: the agent runs again, the record answers it up to a call, and a model goes on. Pages have a viewer's key:
// a live server starts it only with the admin key, which is sent once and not kept.

const SEEN_S = 120;

function branching(run, base, current, redraw) {
  const element = h("div", { class: "branch" });
  let chosen = null;

  async function choose(call, number) {
    chosen = chosen === call.id ? null : call.id;
    replace(element);
    redraw();
    if (chosen === null) return;
    const [card, files, fleet] = await Promise.all([get(runPath(run, "/card")), get(runPath(run, "/files")), get("/api/fleet").catch(() => null)]);
    const model = files.checkpoints.length || !card.model ? run : card.model;
    const live = fleet !== null && fleet.engines.some((one) => !one.run) && fleet.workers.some((one) => one.seen > fleet.now - SEEN_S);
    replace(element,
      h("p", { class: "soft" }, `The agent runs again: ${number === 1 ? "call 1 is" : `calls 1 to ${number} are`} answered from this record, and the model goes on. In the folder of the configuration:`),
      h("pre", {}, ["leyden", "replay", run, current().rollout.id, "--from", `${number}`, "--model", model].map(quoted).join(" ")),
      live && start(number));
  }

  function start(number) {
    const key = h("input", { type: "password", name: "admin key", autocomplete: "off", required: true, placeholder: "admin key", "aria-label": "Admin key" });
    const said = h("span", { class: "soft", role: "status" });
    return h("form", { onsubmit: async (event) => {
      event.preventDefault();
      const { task, attempt } = current();
      const group = `branch-${Date.now().toString(36)}`;
      try {
        await post(runPath(run, "/groups"), key.value, { id: group, task, purpose: "dev", max_attempts: 1, origin: { attempt: attempt.id, calls: number } });
        replace(said, "queued: ", h("a", { class: "code", href: `${base}/${group}.0` }, `${group}.0`));
      } catch (error) {
        replace(said, error.message);
      }
    } }, "Or now, by a worker of this server, outside of training: ", key, " ", h("button", {}, "Run"), " ", said);
  }

  return {
    button: (call, number) => call.status === "ok" && current().attempt.number === current().attempts.length && h("button", { class: "quiet", "aria-expanded": String(chosen === call.id), onclick: () => choose(call, number) }, "branch here"),
    panel: (call) => chosen === call.id && element,
  };
}

function quoted(word) {
  return /^[\w./:=@-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

function showMessage(message) {
  const who = typeof message?.role === "string" ? message.role : "message";
  return h("div", { class: `message ${["system", "user", "tool", "assistant"].includes(who) ? who : ""}` }, h("span", { class: "who" }, who), h("div", { class: "text" }, messageText(message)));
}

function messageText(message) {
  if (message === null || message === undefined) return "";
  if (typeof message === "string") return message;
  const parts = [];
  if (typeof message.content === "string") parts.push(message.content);
  else if (Array.isArray(message.content)) parts.push(...message.content.map((part) => typeof part?.text === "string" ? part.text : pretty(part)));
  else if (message.content) parts.push(pretty(message.content));
  for (const call of message.tool_calls ?? []) parts.push(`${call?.function?.name ?? "tool"}(${call?.function?.arguments ?? ""})`);
  return parts.length ? parts.join("\n") : pretty(message);
}

// How many tokens of a call were not trained on, by the reason.
function untrained(call) {
  const counts = new Map();
  for (const [, , , why] of call.tokens) if (why) counts.set(why, (counts.get(why) ?? 0) + 1);
  return counts.size > 0 && h("span", { class: "chip warn untrained" }, `not trained on: ${[...counts].map(([why, count]) => `${plural(count, "token")} ${why}`).join(", ")}`);
}

function showToken([text, logprob, version, why], call, view, shade) {
  const newest = view.versions[call.policy] ?? null;
  const stale = version !== null && newest !== null ? newest - version : null;
  const advantage = call.credit?.advantage ?? null;
  const values = { logprob: logprob === null ? null : Math.min(1, -logprob / 4), staleness: stale === null ? null : Math.min(1, stale / 4), advantage };
  const value = values[shade] ?? null;
  const label = [logprob !== null && `logprob ${logprob.toFixed(3)} (p ${Math.exp(logprob).toFixed(3)})`, version !== null && `version ${version}${stale ? `, ${stale} behind` : ""}`, advantage !== null && `advantage ${number(advantage)}`, why && `not trained on: ${why}`].filter(Boolean).join("\n");
  const token = h("span", { class: `token${why ? " untrained" : ""}`, title: label }, text);
  if (value !== null && value !== 0) {
    const strength = Math.min(1, Math.abs(value));
    token.classList.add(shade === "advantage" ? (value > 0 ? "up" : "down") : "heat");
    token.style.setProperty("--strength", `${Math.round(strength * 60)}%`);
  }
  return token;
}

// The group's prefix tree: a row for each call, from the first token to the last

function tree(run, current) {
  const body = h("div");
  let asked = false;
  const element = h("details", { class: "panel", ontoggle: () => {
    if (element.open && !asked) load();
  } }, h("summary", {}, "Prefix tree of the group"), body);

  async function load() {
    asked = true;
    const { rollout } = current();
    const found = await get(runPath(run, `/groups/${encodeURIComponent(rollout.group)}/tree`));
    if (!found.nodes.length) return replace(body, h("p", { class: "soft" }, "The group has no calls."));
    const saved = found.tokens ? 1 - found.distinct / found.tokens : 0;
    replace(body, h("p", { class: "soft" }, `${whole(found.tokens)} tokens in all sequences, ${whole(found.distinct)} in the tree: ${Math.round(saved * 100)} % are computed once instead of again. Grey: prompt. Colour: sampled by the model.`), h("div", { class: "scroll" }, drawTree(found.nodes, rollout.index)));
  }
  return { element };
}

function drawTree(nodes, own) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, index) => (node.parent < 0 ? roots : children[node.parent]).push(index));
  const depth = nodes.map(() => 0);
  nodes.forEach((node, index) => { depth[index] = node.parent < 0 ? 0 : depth[node.parent] + nodes[node.parent].tokens; });
  const longest = Math.max(...nodes.map((node, index) => depth[index] + node.tokens));
  const top = nodes.map(() => 0);
  const height = nodes.map(() => 0);
  let row = 0;
  const order = [];
  const pending = [...roots].reverse();
  while (pending.length) {
    const index = pending.pop();
    order.push(index);
    if (!children[index].length) {
      top[index] = row;
      height[index] = 1;
      row += 1;
    }
    pending.push(...[...children[index]].reverse());
  }
  for (const index of order.reverse()) {
    if (!children[index].length) continue;
    top[index] = Math.min(...children[index].map((child) => top[child]));
    height[index] = Math.max(...children[index].map((child) => top[child] + height[child])) - top[index];
  }
  const unit = Math.max(5, Math.min(16, 320 / row));
  const width = 1000;
  const drawing = svg("svg", { class: "tree", viewBox: `0 0 ${width} ${row * unit + 2}`, height: row * unit + 2, preserveAspectRatio: "none", role: "img", "aria-label": `prefix tree with ${nodes.length} nodes` });
  nodes.forEach((node, index) => {
    const mine = node.rollouts.includes(own);
    drawing.append(svg("rect", { class: `${node.sampled ? "sampled" : "prompt"}${mine ? " own" : ""}`, x: (depth[index] / longest) * width, y: top[index] * unit + 1, width: Math.max(1, (node.tokens / longest) * width - 0.8), height: Math.max(1, height[index] * unit - 1) },
      svg("title", {}, `${plural(node.tokens, "token")} ${node.sampled ? "sampled" : "of the prompt"}, ${plural(node.calls, "call")}, rollouts ${node.rollouts.map((one) => `.${one}`).join(" ")}\n${node.text}`)));
  });
  return drawing;
}

function pretty(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}
