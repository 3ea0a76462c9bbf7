// Lists that the server sorts and pages.

import { h, replace, whole } from "./dom.js";

// Which rows are shown, and the buttons to the others; `change({ offset })` shows those.
export function showPager(pager, offset, size, total, change) {
  replace(pager,
    h("span", { class: "soft", "data-total": total }, total ? `${whole(offset + 1)} to ${whole(Math.min(offset + size, total))} of ${whole(total)}` : "0"),
    h("button", { type: "button", disabled: offset === 0, onclick: () => change({ offset: String(Math.max(0, offset - size) || "") }) }, "Previous"),
    h("button", { type: "button", disabled: offset + size >= total, onclick: () => change({ offset: String(offset + size) }) }, "Next"));
}

// The head of a column, with a button if it can be sorted by; `sort` is the present order, `change({ sort })` changes it.
export function header(name, key, style, sort, change) {
  const [up, down] = [key && sort === key, key && sort === `-${key}`];
  return h("th", { class: style, "aria-sort": up ? "ascending" : down ? "descending" : null },
    key ? h("button", { type: "button", class: "sort", onclick: () => change({ sort: down ? key : `-${key}` }) }, name, up ? " ▲" : down ? " ▼" : "") : name);
}
