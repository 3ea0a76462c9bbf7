// Exchanges a key for a cookie. A link carries the key behind #, which browsers do not send to servers.

const wrong = document.getElementById("wrong");

async function signIn(key) {
  const reply = await fetch("/signin", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ key }),
  });
  if (reply.ok) {
    location.replace(location.pathname === "/signin" ? "/" : location.pathname + location.search);
    return;
  }
  const body = await reply.json().catch(() => null);
  wrong.textContent = body?.error?.message ?? `The server answered ${reply.status}.`;
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(document.getElementById("key").value);
});

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("key")) {
  history.replaceState(null, "", location.pathname);
  signIn(given.get("key"));
}
