"""Requests that were made to be slow, while 50 other clients call a model: nobody else waits for them.

Every attack is one request that an agent's key may send: a strict tool whose `pattern` backtracks, schemas that
repeat themselves, a prompt for a role's rule, a model name for a route with stars, a tool result that looks like a
traceback (and the page that shows it), compressed reasoning and arguments of megabytes, a format whose grammar
explodes, an OTLP export that expands. Each is sent over and over by its own attempt. The other clients call a
scripted model that answers at once, and think between calls.

    python benchmarks/hostile_patterns.py
    python benchmarks/hostile_patterns.py --seconds 5 --clients 5

The last line is one JSON object: `ratio` is the share of the other clients' calls under attack that were answered
within a second, `longest_wait_s` their longest wait, `waits` has their waits before and under attack, `attacks` how
often each attack was answered, and how long that took.
"""

import argparse
import asyncio
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from reporting import add_out, report_result

from leyden.api.client import Remote, read_key
from leyden.api.wire import GroupSpec, KeySpec, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task
from leyden.server.gateway.dialects.responses.items import seal_reasoning

HERE = Path(__file__).parent
THINK_S = 0.5
REQUEST_TIMEOUT_S = 120.0
PAUSE_S = 0.25
"""Between two attacks of a kind, so that many answers at once do not hide one slow one."""
SETTINGS = RunSettings(
    lease_s=3600,
    max_calls=10**6,
    roles={"critic": "You.*are.*a.*critic", "writer": "(You |are |a )+writer"},
    routes={"*a*a*a*a*c": "model", "caller": "caller", "*": "model"},
)
ARGUMENTS = {"q": "a" * 40 + "b", "n": [{"a": number} for number in range(20)]}
"""Of the tool call that the scripted model `caller` makes, with which every strict tool is checked."""
PARTS = {f"p{at}": {"anyOf": [{"$ref": f"#/$defs/p{at + 1}"}] * 2} for at in range(40)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "look-ahead": {"properties": {"q": {"pattern": f"^(?=a){'(a|a)' * 40}$"}}},
    "alternatives": {"properties": {"q": {"pattern": f"^{'(a|a)' * 40}$"}}},
    "repeated references": {"$defs": {**PARTS, "p40": {"type": "integer"}}, "$ref": "#/$defs/p0"},
    "repeated items": {"properties": {"n": {"allOf": [{"items": {"uniqueItems": True, "not": {}}}] * 1000}}},
    "large patterns": {"properties": {"q": {"allOf": [{"pattern": r"(?i)[^\p{L}\w]" * 30}] * 100}}},
    "names": {"patternProperties": {f"(a?){{{number}}}c": {} for number in range(100, 200)}},
}
GRAMMAR = {"allOf": [{"type": "string", "pattern": f".*a{{{number}}}.*"} for number in range(1, 21)]}
TRACEBACK = "Traceback (most recent call last):\n x\n" + "Error." * 2500
SPANS = gzip.compress(b"\x0a\x00" * (8 << 20), 1)
QUESTION = {"role": "user", "content": "?"}
THOUGHT = [{"type": "reasoning", "encrypted_content": seal_reasoning("x" * 15_000_000)}, QUESTION]
LARGE_CALL = {"id": "c", "type": "function", "function": {"name": "check", "arguments": f"[{'1.0,' * 1_000_000}1]"}}
CALLED = json.dumps({"model": "model", "messages": [QUESTION, {"role": "assistant", "tool_calls": [LARGE_CALL]}]})

Send = Callable[[], Awaitable[Any]]


class Caller:
    """One key and the requests that are sent with it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, url
        self._headers = {"authorization": f"Bearer {key}"}

    async def chat(self, **body: Any) -> int:
        """Call a model; return the status."""
        return await self.post("/v1/chat/completions", json={"model": "model", "messages": [QUESTION], **body})

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> int:
        """Send a body; return the status."""
        sent = {**self._headers, **(headers or {})}
        async with self._session.post(self._url + path, headers=sent, **body) as reply:
            await reply.read()
            return reply.status

    async def get(self, path: str) -> int:
        """Fetch something; return the status."""
        async with self._session.get(self._url + path, headers=self._headers) as reply:
            await reply.read()
            return reply.status


def attacks(caller: Callable[[], Caller], viewer: Caller, page: str) -> dict[str, Send]:
    """Return the attacks by name; each has a key of its own."""

    def strict(schema: dict[str, Any]) -> Send:
        tool = {"type": "function", "function": {"name": "check", "strict": True, "parameters": schema}}
        attacker = caller()
        return lambda: attacker.chat(model="caller", tools=[tool])

    by_role, by_name, by_format, by_spans, by_reasoning, by_arguments = (caller() for _ in range(6))
    prompt = [{"role": "system", "content": "You are a " * 6500}, QUESTION]
    wanted = {"type": "json_schema", "json_schema": {"name": "v", "schema": GRAMMAR}}
    as_json = {"content-type": "application/json"}
    packed = {"content-encoding": "gzip", "content-type": "application/x-protobuf"}
    return {
        **{f"schema: {name}": strict(schema) for name, schema in SCHEMAS.items()},
        "rule of a role": lambda: by_role.chat(messages=prompt),
        "route with stars": lambda: by_name.chat(model="ab" * 30_000),
        "reasoning that expands": lambda: by_reasoning.post("/v1/responses", json={"model": "model", "input": THOUGHT}),
        "arguments of a call": lambda: by_arguments.post("/v1/chat/completions", as_json, data=CALLED),
        "grammar": lambda: by_format.chat(response_format=wanted),
        "spans": lambda: by_spans.post("/v1/traces", packed, data=SPANS),
        "page of a traceback": lambda: viewer.get(page),
    }


async def repeat(send: Send, waits: list[float]) -> None:
    """Send something again and again."""
    while True:
        started = time.monotonic()
        await send()
        waits.append(time.monotonic() - started)
        await asyncio.sleep(PAUSE_S)


async def call_and_think(caller: Caller, waits: list[float], offset_s: float) -> None:
    """Call a model as an agent does, and note how long each answer took."""
    await asyncio.sleep(offset_s)
    while True:
        started = time.monotonic()
        status = await caller.chat()
        waits.append(time.monotonic() - started)
        if status != 200:
            raise SystemExit(f"a client that does nothing wrong got status {status}")
        await asyncio.sleep(THINK_S)


async def record_traceback(caller: Caller, attempt: str) -> str:
    """Record a call whose tool failed at length; return the path of the page's data."""
    call = {"id": "c", "type": "function", "function": {"name": "check", "arguments": "{}"}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    assert await caller.chat(messages=[*messages, {"role": "tool", "tool_call_id": "c", "content": TRACEBACK}]) == 200
    return f"/api/runs/hostile/rollouts/{attempt.rpartition('.')[0]}/view"


async def measure(home: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Measure the waits of the clients for some seconds without attacks, then with all of them."""
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "scripted_server.py"), str(home), "caller", json.dumps(ARGUMENTS)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: ASYNC220 - it returns at once
    try:
        assert server.stdout is not None
        started = json.loads(server.stdout.readline())
        timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)
        async with (
            Remote(started["url"], read_key(Path(started["admin_key_file"]))) as remote,
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            leases = {}
            for run, count in (("others", clients), ("hostile", 20)):
                await remote.create_run(RunSpec(run, SETTINGS))
                await remote.enqueue(run, GroupSpec(run, Task("t", {}), count))
                leases[run] = await remote.lease(LeaseRequest("w", count, run=run, wait=30))
            callers = [Caller(session, started["url"], lease.key) for lease in leases["others"]]
            hostile = iter([(Caller(session, started["url"], lease.key), lease) for lease in leases["hostile"]])
            first, lease = next(hostile)
            page = await record_traceback(first, lease.attempt.id)
            viewer = Caller(session, started["url"], (await remote.create_key(KeySpec("viewer"))).key)
            every = attacks(lambda: next(hostile)[0], viewer, page)

            before, under = list[float](), list[float]()
            answered: dict[str, list[float]] = {name: [] for name in every}
            await _for_some_time(seconds, [call_and_think(one, before, _offset(at)) for at, one in enumerate(callers)])
            calls = [call_and_think(one, under, _offset(at)) for at, one in enumerate(callers)]
            await _for_some_time(seconds, calls + [repeat(send, answered[name]) for name, send in every.items()])
    finally:
        server.terminate()
        server.wait(60)
    return {
        "ratio": round(sum(wait <= 1 for wait in under) / len(under), 4),
        "longest_wait_s": round(max(under), 3),
        "clients": clients,
        "waits": {"before": _described(before), "under attack": _described(under)},
        "attacks": {name: _described(waits) for name, waits in answered.items()},
    }


async def _for_some_time(seconds: float, work: list[Any]) -> None:
    """Run endless work; a part that is waiting at the end is cancelled."""
    tasks = [asyncio.create_task(part) for part in work]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in done:
        task.result()


def _offset(number: int) -> float:
    return number % 50 / 50 * THINK_S


def _described(waits: list[float]) -> dict[str, Any]:
    if len(waits) < 2:
        return {"count": len(waits)}
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    times = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(waits)}
    return {"count": len(waits), **{name: round(1000 * value, 1) for name, value in times.items()}}


def main() -> None:
    """Run what the arguments ask for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two phases")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report_result(asyncio.run(measure(Path(folder), options.clients, options.seconds)), options.out)


if __name__ == "__main__":
    main()
