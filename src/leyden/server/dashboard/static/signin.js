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

function here() {
  return location.pathname === "/signin" ? "/" : location.pathname + location.search;
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(document.getElementById("key").value, here());
});

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("key")) {
  history.replaceState(null, "", location.pathname);
  const to = new URL(given.get("to") ?? here(), location.origin);
  signIn(given.get("key"), to.origin === location.origin ? to : here()); // a link leads to pages of this server only
}
