// The router: shows the page that the path names, and follows links without loading the document again.

import { GONE } from "./data.js";
import { h, replace, title } from "./dom.js";

// Each page is loaded when it is first shown.
const PAGES = [
  [/^\/$/, () => import("./runs.js")],
  [/^\/compare$/, () => import("./compare.js")],
  [/^\/workers$/, () => import("./workers.js")],
  [/^\/runs\/([^/]+)$/, () => import("./run.js")],
  [/^\/runs\/([^/]+)\/tasks$/, () => import("./tasks.js")],
  [/^\/runs\/([^/]+)\/rollouts$/, () => import("./rollouts.js")],
  [/^\/runs\/([^/]+)\/rollouts\/([^/]+)$/, () => import("./rollout.js")],
];

const main = document.getElementById("main");
let current = new AbortController();

function links(path) {
  const run = path.match(/^\/runs\/([^/]+)/)?.[1];
  const found = [["/", "Runs"], ["/workers", "Workers"]];
  if (run) found.push([`/runs/${run}`, decodeURIComponent(run)], [`/runs/${run}/rollouts`, "Rollouts"], [`/runs/${run}/tasks`, "Tasks"]);
  return found.map(([to, name]) => h("a", { href: to, "aria-current": to === path ? "page" : null }, name));
}

async function show() {
  current.abort();
  current = new AbortController();
  const { signal } = current;
  const path = location.pathname.replace(/(.)\/$/, "$1");
  const nav = replace(document.getElementById("nav"), links(path));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.body.dataset.ready = "";
  for (const [pattern, load] of PAGES) {
    const found = path.match(pattern);
    if (!found) continue;
    try {
      const { show: page } = await load().catch(() => { throw new Error(GONE); });
      if (signal.aborted) return;
      await page(main, { params: found.slice(1).map(decodeURIComponent), query: new URLSearchParams(location.search), signal, go });
    } catch (error) {
      if (!signal.aborted) replace(main, h("p", { class: "empty bad", role: "alert" }, error.message));
    }
    if (!signal.aborted) document.body.dataset.ready = "yes";
    return;
  }
  title("Not found");
  replace(main, h("p", { class: "empty" }, "There is no such page."));
  document.body.dataset.ready = "yes";
}

export function go(path, { replaced = false } = {}) {
  history[replaced ? "replaceState" : "pushState"](null, "", path);
  return show().then(() => {
    if (replaced) return;
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (link.hasAttribute("download") || link.target || link.origin !== location.origin || link.getAttribute("href")[0] === "#") return;
  event.preventDefault();
  go(link.pathname + link.search);
});
addEventListener("popstate", show);

// Theme

const theme = document.getElementById("theme");
function applyTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
}
applyTheme(localStorage.getItem("theme"));
function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  localStorage.setItem("theme", dark ? "light" : "dark");
  applyTheme(dark ? "light" : "dark");
}
theme.addEventListener("click", toggleTheme);

// Keys: g r (runs), g w (workers), t (theme), / (first filter), j and k (rows)

let prefix = "";
document.addEventListener("keydown", (event) => {
  if (event.target.closest?.("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
  const typed = prefix + event.key;
  prefix = event.key === "g" ? "g" : "";
  if (typed === "gr") go("/");
  else if (typed === "gw") go("/workers");
  else if (event.key === "t") toggleTheme();
  else if (event.key === "/") {
    const field = main.querySelector("input, select");
    if (field) {
      event.preventDefault();
      field.focus();
    }
  } else if (event.key === "j" || event.key === "k") {
    const rows = [...main.querySelectorAll("tbody a.row")];
    const next = rows[rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1)];
    next?.focus();
  }
});

show();
