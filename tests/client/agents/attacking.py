"""An agent that tries its key on every route, for its own attempt and for a neighbour's, and returns the statuses."""

import json
import os
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

FINAL = [{"id": "forged", "value": 1e6, "kind": "final", "source": "reward"}]
BODIES: dict[str, Any] = {
    "rewards": FINAL,
    "finish": {"outcome": {"ending": "succeeded"}, "rewards": FINAL},
    "calls": [{"id": "forged", "prompt_ids": [1], "completion_ids": [2], "logprobs": [-0.1]}],
    "keys": {"kind": "admin"},
    "lease": {"worker": "w", "count": 100},
    "chat/completions": {"model": "any", "messages": [{"role": "user", "content": "number 7"}]},
    "responses": {"model": "any", "input": "number 7"},
    "messages": {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": "number 7"}]},
    "completions": {"model": "any", "prompt": "number 7"},
}


def request(method: str, path: str, body: Any = None, **headers: str) -> int:
    """Send a request as it is: no instrumentation adds who sends it."""
    server = urlsplit(os.environ["ANTHROPIC_BASE_URL"])
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        *(f"{method} {path} HTTP/1.1", f"host: {server.netloc}", "connection: close"),
        *(f"authorization: Bearer {os.environ['OPENAI_API_KEY']}", f"content-length: {len(data)}"),
        *(["content-type: application/json"] if data else []),
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    with socket.create_connection((server.hostname or "", server.port or 80), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        head = connection.makefile("rb").readline()
    return int(head.split()[1])


def body_for(path: str, traceparent: str) -> Any:
    if path.endswith("/traces"):
        _, trace, parent, _ = traceparent.split("-")
        times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
        span = {"traceId": trace, "spanId": parent, "name": "forged", "kind": 1, **times}
        return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    return next((body for end, body in BODIES.items() if path.endswith("/" + end)), {})


def attack(task: dict[str, Any]) -> dict[str, Any]:
    from leyden.client.tracing.context import current_attempt
    from leyden.records import trace_id

    me = current_attempt()
    assert me is not None
    return walk(task, me, f"00-{trace_id(me)}-{'1' * 16}-01")


def walk(task: dict[str, Any], me: str, traceparent: str) -> dict[str, Any]:
    """Try every route with the names of the neighbour, and with those of this attempt."""
    mine = {**task["neighbour"], "attempt": me, "rollout": me.rpartition(".")[0], "traceparent": traceparent}
    found: dict[str, Any] = {"neighbour": {}, "mine": {}}
    for whose, names in (("neighbour", task["neighbour"]), ("mine", mine)):
        for method, template in task["routes"]:
            path = template.format(**names)
            body = body_for(path, names["traceparent"]) if method in ("POST", "PUT", "PATCH") else None
            found[whose][f"{method} {template}"] = request(method, path, body, traceparent=names["traceparent"])
    rewards = f"/api/runs/r/attempts/{me}/rewards"
    for kind in ("final", "automatic", "step"):
        found[kind] = request("POST", rewards, [{"id": kind, "value": 0.5, "kind": kind, "source": "reward"}])
    return found


def quarter(task: dict[str, Any], result: Any) -> float:
    return 0.25


if __name__ == "__main__":
    print(json.dumps(walk(json.load(sys.stdin), os.environ["LEYDEN_ATTEMPT"], os.environ["TRACEPARENT"])))
