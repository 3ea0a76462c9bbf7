// Exchanges a key for a cookie. A link carries the key behind #, which browsers do not send to servers.

const wrong = document.getElementById("wrong");

async function signIn(key, to) {
  const reply = await fetch("/signin", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ key }),
  });
  if (reply.ok) {
    location.replace(to);
    return;
  }
  const body = await reply.json().catch(() => null);
  wrong.textContent = body?.error?.message ?? `The server answered ${reply.status}.`;
}

function target(path) {
  const here = location.pathname === "/signin" ? "/" : location.pathname + location.search;
  return path?.startsWith("/") && !path.startsWith("//") ? path : here;
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(document.getElementById("key").value, target(null));
});

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("key")) {
  history.replaceState(null, "", location.pathname);
  signIn(given.get("key"), target(given.get("to")));
}
