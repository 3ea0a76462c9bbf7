"""Requests mutated from valid ones, over every route: whatever a caller sends, the server neither fails nor hangs.

Clients send requests to a server with a scripted model: control API, OTLP, every dialect, the dashboard. Another caller
asks for something valid all the time, and its longest wait is measured. Attempts are replaced often, so that memory can
return when they end.

    python benchmarks/fuzz.py                   100,000 requests
    python benchmarks/fuzz.py --requests 2000 --seed 3

The last line is one JSON object: `failed` counts answers of 500 and above, and `ratio` is the share of the others;
`reached` is the share of requests that were decoded and reached their handlers, `longest_wait_s` is the other caller's.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from reporting import add_out, report_result

from leyden.api.client import Remote, read_key
from leyden.api.endpoint import Permission
from leyden.api.wire import FinishRequest, GroupSpec, KeySpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import RunSettings, Task
from leyden.server.control.routes import ROUTES
from leyden.server.http.responses import Raw, Route

HERE = Path(__file__).parent
CLIENTS, REQUESTS_OF_AN_ATTEMPT = 8, 500
REQUEST_TIMEOUT_S = 60.0
WAITING_S = 0.5
"""How long a client waits for an answer that may take long by design."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 2, "minimum": 0}}, "required": ["n"]}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Seen."},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, {"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Go on."},
    ],
    "tools": [
        {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "temperature": 1.0,
    "max_tokens": 5,
    "n": 1,
    "stop": ["x"],
    "stream": False,
    "stream_options": None,
    "logprobs": True,
    "top_logprobs": 2,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "Seen."}, {"type": "tool_reference", "tool_name": "look"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "u"},
    "temperature": 1.0,
    "stop_sequences": ["x"],
    "stream": False,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": [{"type": "reasoning_text", "text": ""}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Seen."}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Seen."},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"role": "developer", "content": "Go on."},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
        {"type": "web_search"},
        {"type": "tool_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "auto",
    "metadata": {"a": "b"},
    "store": True,
    "max_output_tokens": 16,
    "text": {"format": {"type": "json_schema", "name": "v", "schema": SCHEMA}},
    "stream": False,
}
SPAN = {
    "traceId": "0" * 31 + "1",
    "spanId": "0" * 15 + "1",
    "name": "n",
    "kind": 1,
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
    "attributes": [{"key": "d", "value": {"doubleValue": 1.5}}],
    "events": [{"name": "e", "timeUnixNano": "1"}],
    "links": [{"traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1"}],
    "status": {"code": 1},
}
RESOURCE = {"attributes": [{"key": "k", "value": {"stringValue": "v"}}]}
SCOPE = {"scope": {"name": "s"}, "spans": [SPAN]}
GOOGLE: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Look."}]},
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"text": "So."},
                {"functionCall": {"id": "c1", "name": "look", "args": {"at": 1}}, "thoughtSignature": "cw=="},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "Seen."}}},
                {"inlineData": {"mimeType": "image/png", "data": ""}},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "parameters": {"type": "OBJECT", "properties": {"at": {"type": "INTEGER"}}}},
                {"name": "see", "description": "d", "parametersJsonSchema": SCHEMA},
            ]
        }
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
    "generationConfig": {
        "temperature": 1,
        "topK": 5,
        "stopSequences": ["x"],
        "candidateCount": 1,
        "maxOutputTokens": 5,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "STRING", "nullable": True, "minLength": "1"},
        "responseLogprobs": True,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
    },
}
BODIES: dict[str, Any] = {  # by the end of the path
    "/chat/completions": CHAT,
    "/messages": MESSAGES,
    "/messages/count_tokens": {key: MESSAGES[key] for key in ("model", "messages", "system", "tools")},
    "/responses": RESPONSES,
    "/responses/input_tokens": {key: RESPONSES[key] for key in ("model", "input", "instructions")},
    ":generateContent": GOOGLE,
    ":streamGenerateContent": GOOGLE,
    "/models/{model:path}": {"content": GOOGLE["contents"][0]},
    ":countTokens": {"generateContentRequest": {"model": "models/m", **GOOGLE}},
    "/completions": {"model": "m", "prompt": "Once", "max_tokens": 5, "echo": False, "logprobs": 1, "n": 1},
    "/v1/traces": {
        "resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"scope": {"name": "s"}, "spans": [SPAN]}]}]
    },
    "/api/runs": {"id": "made", "settings": {"lease_s": 60.0, "max_calls": 5, "sampling": {"temperature": 1.0}}},
    "/metrics": [{"step": 1, "name": "x", "value": 0.5}],
    "/credits": {"step": 1, "calls": [{"attempt": "{attempt}", "call": "c", "value": 1.0, "tokens": 2}]},
    "/versions": {"policy": "p", "number": 1},
    "/groups": {"id": "g-made", "task": {"id": "t", "input": {"q": [1, "x"]}}, "size": 2, "priority": 0},
    "/scorings": {"worker": "w", "wait": 0.0, "run": "scrap"},
    "/beat": {"number": 1},
    "{worker}/beat": {"attempts": ["{attempt}"]},
    "/scores": {"number": 1, "rewards": {"g.0": 1.0}, "message": "m"},
    "/calls": [
        {"id": "c", "prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5], "messages": [{"role": "user"}]}
    ],
    "/rewards": [{"id": "r", "value": 0.5, "kind": "step", "source": "agent"}],
    "/finish": {"outcome": {"ending": "succeeded", "message": ""}, "result": {"a": 1}, "rewards": [], "output": "x"},
    "/timeout": {"ran_s": 1.0, "limit_s": 60.0},
    "/lease": {"worker": "w", "count": 1, "wait": 0.0, "run": "scrap"},
    "/keys": {"kind": "viewer", "run": "fuzz", "ttl_s": 60.0},
    "/signin": {"key": "leyden-x"},
    "/{path:path}": {"input": "x", "model": "m"},
}
QUERY = {"after": "0", "limit": "10", "wait": "0", "kind": "metrics", "names": "x", "points": "10", "attempt": "1"}
VALUES: list[Any] = [None, True, 5, -1, 10**400, 0.5, 1e308, "", "x", "\x00", "\ud7ff", [], {}, [[]], {"": None}, [5]]
NAMES = ("multipleOf", "$ref", "type", "pattern", "role", "allOf", "id", "name", "content", "text", "x")
DIALECT_WEIGHT = 4
"""How much more often the routes that generate are called: their bodies have the most parts."""
WEIGHTS = [DIALECT_WEIGHT if route.permission is Permission.CALL_MODELS and route.body else 1 for route in ROUTES]
SCRAPPING = ("/finish", "/cancel", "/timeout", "/scores", "/beat", "/hold", "/versions", "/groups", "/credits")
"""Routes that would end or hold what the other requests use: they concern another run."""


def mutate(document: Any, chance: random.Random) -> Any:
    """Change one value, or drop or repeat it."""
    document = deepcopy(document)
    spots: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        part = todo.pop()
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            spots.append((part, key))
            if isinstance(part[key], (dict, list)):
                todo.append(part[key])
    if not spots:
        return chance.choice(VALUES)
    owner, key = chance.choice(spots)
    match chance.randrange(4):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.append(deepcopy(owner[key]))
        case 2 if isinstance(owner, dict):
            owner[chance.choice(NAMES)] = chance.choice(VALUES)
        case _:
            owner[key] = chance.choice(VALUES)
    return document


def body_of(path: str) -> Any:
    """Return a valid body for a route."""
    endings = [ending for ending in BODIES if path.endswith(ending)]
    return BODIES[max(endings, key=len)] if endings else {}


def reached_handler(route: Route, status: int) -> bool:
    """Whether a request with this response status was admitted, decoded and passed to its handler.

    Handlers decode `Raw` bodies themselves, so they also answer 400.
    """
    return status < 400 or status in (404, 409) or (route.body is Raw and status not in (401, 403, 429))


class Client:
    """Sends mutated requests for its own attempts."""

    def __init__(self, remote: Remote, session: aiohttp.ClientSession, seed: int, viewer: str, admin: str) -> None:
        self._remote, self._session, self._chance = remote, session, random.Random(seed)
        self._viewer, self._admin, self._name = viewer, admin, f"c{seed}"
        self._attempts: dict[str, tuple[str, str]] = {}
        self._lives = 0
        self.statuses: Counter[int] = Counter()
        self.reached = 0
        self.failures: list[str] = []

    async def run(self, count: int) -> None:
        """Send so many requests, and end the attempts they were for."""
        for number in range(count):
            if number % REQUESTS_OF_AN_ATTEMPT == 0:
                await self.end_attempts()
                await self._new_attempts()
            await self._send(self._chance.choices(ROUTES, WEIGHTS)[0])
        await self.end_attempts()

    async def _new_attempts(self) -> None:
        self._lives += 1
        for run in ("fuzz", "scrap"):
            group = f"{run}-{self._name}-{self._lives}"
            await self._remote.enqueue(run, GroupSpec(group, Task("t", {}), priority=10))
            for lease in await self._remote.lease(LeaseRequest(self._name, 1, run=run, wait=5.0)):
                self._attempts[run] = lease.attempt.id, lease.key

    async def end_attempts(self) -> None:
        """Finish the attempts of this client."""
        for run, (attempt, _) in self._attempts.items():
            await self._remote.finish(run, attempt, FinishRequest(Outcome(Ending.AGENT_ERROR)))

    async def _send(self, route: Route) -> None:
        chance = self._chance
        ends_run = route.method == "DELETE" or route.path.endswith("{run}/end")
        run = "scrap" if route.path.endswith(SCRAPPING) or ends_run else "fuzz"
        attempt, key = self._attempts[run]
        names = {
            "run": "absent" if ends_run else run,
            "attempt": attempt,
            "rollout": attempt.rpartition(".")[0],
            "group": attempt.rpartition(".")[0].rpartition(".")[0],
            "worker": self._name,
            "policy": "absent",
            "role": "r",
            "file": "app.js",
        }
        odd = chance.choice(("", "%00", "a b", "..", "x" * 300, "é"))
        path = re.sub(
            r"{(\w+)(?::path)?}", lambda found: odd if chance.random() < 0.05 else names.get(found[1], "x"), route.path
        )
        headers = {"authorization": f"Bearer {self._key(route, key)}"}
        data, content_type = None, "application/json"
        if route.body is not None:
            data, content_type = self._body(route, attempt)
            headers["content-type"] = content_type
        params = {}
        if route.query is not None and chance.random() < 0.5:
            name = chance.choice(list(QUERY))
            params[name] = chance.choice((QUERY[name], str(chance.choice(VALUES))[:50]))
        timeout = aiohttp.ClientTimeout(WAITING_S if self._may_wait(route) else REQUEST_TIMEOUT_S)
        try:
            async with self._session.request(
                route.method, self._remote.url + path, data=data, headers=headers, params=params, timeout=timeout
            ) as reply:
                text = await reply.read()
        except TimeoutError:
            if not self._may_wait(route):
                self.failures.append(f"{route.method} {route.path}: no answer within {REQUEST_TIMEOUT_S:g} s")
            self.reached += 1
            return
        self.statuses[reply.status] += 1
        self.reached += reached_handler(route, reply.status)
        if reply.status >= 500:
            self.failures.append(f"{reply.status} {route.method} {path} {data!r:.2000}: {text!r:.500}")

    def _body(self, route: Route, attempt: str) -> tuple[bytes, str]:
        chance = self._chance
        body = json.loads(json.dumps(body_of(route.path)).replace("{attempt}", attempt))
        for _ in range(chance.choice((0, 1, 1, 2))):
            body = mutate(body, chance) if isinstance(body, (dict, list)) else body
        text = json.dumps(body).encode()
        match chance.randrange(20):
            case 0:
                return text[: chance.randrange(len(text) + 1)], "application/json"  # cut short
            case 1:
                return bytes(chance.randrange(256) for _ in range(40)), chance.choice(route.media_types)
            case 2 if "10000000000" not in str(body):
                return msgspec.msgpack.encode(body), "application/msgpack"
        return text, "application/json"

    def _key(self, route: Route, attempt_key: str) -> str:
        if route.permission in (Permission.CALL_MODELS, Permission.TRACE):
            return attempt_key
        return self._viewer if route.permission is Permission.VIEW else self._admin

    @staticmethod
    def _may_wait(route: Route) -> bool:
        return route.waits and not route.path.startswith(("/v1", "/role"))


async def ask_meanwhile(remote: Remote, waits: list[float]) -> None:
    """Ask for something valid all the time, as another caller."""
    while True:
        started = time.monotonic()
        await remote.summarise_run("fuzz")
        waits.append(time.monotonic() - started)
        await asyncio.sleep(0.05)


def start_server(home: Path) -> tuple["subprocess.Popen[bytes]", dict[str, str]]:
    """Start a server with a scripted model; also return what it printed."""
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "scripted_server.py"), str(home)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


async def fuzz(home: Path, requests: int, seed: int) -> dict[str, Any]:
    """Send requests to a server in its own process; returns what happened."""
    process, started = start_server(home)
    admin = read_key(Path(started["admin_key_file"]))
    server, waits = psutil.Process(process.pid), list[float]()
    try:
        async with Remote(started["url"], admin) as remote, aiohttp.ClientSession() as session:
            for run in ("fuzz", "scrap"):
                await remote.create_run(RunSpec(run, RunSettings(lease_s=3600, max_calls=100_000)))
            viewers = [(await remote.create_key(KeySpec("viewer"))).key for _ in range(CLIENTS)]
            clients = [
                Client(remote, session, seed * 1000 + number, viewer, admin) for number, viewer in enumerate(viewers)
            ]
            asking = asyncio.create_task(ask_meanwhile(remote, waits))
            warm = max(1, min(requests // CLIENTS // 10, REQUESTS_OF_AN_ATTEMPT))
            await asyncio.gather(*(client.run(warm) for client in clients))
            before = server.memory_info().rss
            await asyncio.gather(*(client.run(requests // CLIENTS - warm) for client in clients))
            after = server.memory_info().rss
            asking.cancel()
    finally:
        process.terminate()
        ended = process.wait(60)
    failures = [failure for client in clients for failure in client.failures]
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    statuses = sum((client.statuses for client in clients), Counter[int]())
    sent = warm * CLIENTS + (requests // CLIENTS - warm) * CLIENTS
    return {
        "ratio": round(1 - len(failures) / sent, 6),
        "requests": sent,
        "routes": len(ROUTES),
        "failed": len(failures),
        "reached": round(sum(client.reached for client in clients) / sent, 3),
        "longest_wait_s": round(max(waits), 3),
        "memory_mb_before": before >> 20,
        "memory_mb_after": after >> 20,
        "exit_status": ended,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
    }


def main() -> None:
    """Run what the arguments ask for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report_result(asyncio.run(fuzz(Path(folder), options.requests, options.seed)), options.out)


if __name__ == "__main__":
    main()
