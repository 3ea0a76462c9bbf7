// Configurations as flat lists of settings. Settings without a value and empty sections are left out.

import { h } from "./dom.js";

export function flatten(value, prefix = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${name}` : name, found);
  } else if (value !== null) {
    found[prefix] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return found;
}

// The settings of a run, or the settings in which several runs differ; `flats` has flat configurations by run.
export function settingsTable(flats) {
  const names = Object.keys(flats);
  const keys = [...new Set(Object.values(flats).flatMap(Object.keys))];
  const shown = names.length > 1 ? keys.filter((key) => new Set(Object.values(flats).map((flat) => flat[key])).size > 1).sort() : keys;
  if (!shown.length) return h("p", { class: "soft" }, names.length > 1 ? "The configurations are the same." : "The run was created without a configuration.");
  return h("table", { class: "list" },
    names.length > 1 && h("thead", {}, h("tr", {}, h("th", {}, "setting"), names.map((name) => h("th", {}, name)))),
    h("tbody", {}, shown.map((key) => h("tr", {}, h("td", { class: "code" }, key), names.map((name) => h("td", { class: "code wrap" }, flats[name][key] ?? "–"))))));
}
