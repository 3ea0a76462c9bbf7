// Configurations as flat lists of settings. Empty sections, such as [roles] without a role, are left out.

export function flatten(value, prefix = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${name}` : name, found);
  } else if (prefix) {
    found[prefix] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return found;
}

export function differences(flat) {
  const keys = [...new Set(flat.flatMap(Object.keys))].sort();
  return keys.filter((key) => new Set(flat.map((one) => one[key])).size > 1);
}
