"""Model calls per second in every dialect, streamed and not; part of benchmarks/gateway.py."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from scripted_server import ANSWER

ROUNDS = 7
SYSTEM = "You are an oracle. Answer in one sentence."
QUESTION = "What is the answer to life, the universe and everything?"

Headers = dict[str, str]


class BenchDialect(NamedTuple):
    """How a dialect is asked, and where the text is in what it answers."""

    path: str
    body: dict[str, Any]
    text: Callable[[Any], str]
    delta: Callable[[Any], str]


def _chat_delta(event: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _event_delta(kind: str) -> Callable[[Any], str]:
    def delta(event: Any) -> str:
        return str(event["delta"]) if event["type"] == kind else ""

    return delta


_USER = {"role": "user", "content": QUESTION}
DIALECTS = {
    "chat": BenchDialect(
        "chat/completions",
        {"messages": [{"role": "system", "content": SYSTEM}, _USER]},
        lambda answer: answer["choices"][0]["message"]["content"],
        _chat_delta,
    ),
    "messages": BenchDialect(
        "messages",
        {"system": SYSTEM, "messages": [_USER], "max_tokens": 500},
        lambda answer: answer["content"][0]["text"],
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
    ),
    "responses": BenchDialect(
        "responses",
        {"instructions": SYSTEM, "input": [_USER]},
        lambda answer: answer["output"][0]["content"][0]["text"],
        _event_delta("response.output_text.delta"),
    ),
    "completions": BenchDialect(
        "completions",
        {"prompt": f"{SYSTEM}\n\n{QUESTION}\n", "max_tokens": 500},
        lambda answer: answer["choices"][0]["text"],
        lambda event: "".join(choice["text"] for choice in event["choices"]),
    ),
}


async def measure_dialects(base: str, headers: list[Headers], clients: int, seconds: float) -> dict[str, Any]:
    """Measure every dialect, streamed and not, with so many clients; each of them has its own rollout.

    The dialects alternate in short rounds, and medians over the rounds are returned, so that what else the machine does
    strikes all of them. `of_chat` is the rate beside that of whole chat completions in the same round.
    """
    cells = [(name, stream) for name in DIALECTS for stream in (False, True)]
    rounds = [
        [await _drive(base, headers[:clients], name, stream, seconds / ROUNDS) for name, stream in cells]
        for _ in range(ROUNDS + 1)
    ][1:]  # the first one warms up
    measured: dict[str, Any] = {}
    for at, (name, stream) in enumerate(cells):
        median = {key: statistics.median(made[at][key] for made in rounds) for key in rounds[0][at]}
        ratio = statistics.median(made[at]["per_s"] / made[0]["per_s"] for made in rounds)
        measured[f"{name}, {'streamed' if stream else 'whole'}"] = {**median, "of_chat": round(ratio, 2)}
    return measured


async def _drive(base: str, headers: list[Headers], name: str, stream: bool, seconds: float) -> dict[str, float]:
    """Run one client for each of the headers; each makes its next call as soon as it has its answer."""
    dialect, times = DIALECTS[name], list[tuple[float, float]]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()

        async def work(own: Headers) -> None:
            while time.perf_counter() - began < seconds:
                times.append(await _ask(session, base, own, dialect, stream))

        await asyncio.gather(*map(work, headers))
        took = time.perf_counter() - began
    first, whole = zip(*times, strict=True)
    return {
        "per_s": round(len(times) / took, 1),
        "p50_ms": round(statistics.median(whole) * 1e3, 2),
        **({"first_text_p50_ms": round(statistics.median(first) * 1e3, 2)} if stream else {}),
    }


async def _ask(
    session: aiohttp.ClientSession, base: str, headers: Headers, dialect: BenchDialect, stream: bool
) -> tuple[float, float]:
    """Make one call; return the time to its first text and to its end."""
    sent, first, said = time.perf_counter(), 0.0, ""
    body = {"model": "model", "stream": stream, **dialect.body}
    async with session.post(f"{base}/v1/{dialect.path}", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        if stream:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    said += dialect.delta(json.loads(line[6:]))
                    first = first or (time.perf_counter() - sent if said else 0.0)
        else:
            said = dialect.text(await reply.json())
    assert said == ANSWER, said
    return first, time.perf_counter() - sent
