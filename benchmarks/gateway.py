"""Model calls per second and what a gateway adds to each, beside LiteLLM's proxy in front of the same answers.

Both answer at once from within their own process: Leyden from an engine that plays tokens, LiteLLM from its
`mock_response`. Leyden renders the prompt to tokens, parses the answer back and commits the call to disk before its
last byte leaves; LiteLLM keeps nothing. The same load generator drives both, one after the other on the same machine.
Leyden is one server process, as it is shipped. LiteLLM has one worker process a core (`--workers`): its documentation
recommends one worker per pod and as many pods as needed. Both are warmed up with real calls before each measurement.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --dialects            only the dialects
    python benchmarks/gateway.py --against ../other    beside another checkout of Leyden instead, in alternating rounds

Measured at 1, 64 and 512 clients: calls per second, latency (p50, p99), and the time to the first text when streaming,
in the OpenAI chat dialect; then Leyden alone in every dialect, streamed and not, at 64 clients, in alternating rounds;
then the time of turn 20 of a conversation of 16,000 tokens against that of turn 2. The last line is one JSON object;
`ratio` is Leyden's rate over LiteLLM's at 64 clients.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from checkouts import THIS, CompatibleRemote, Measured, add_against, alternate, commits, measure
from gateway_dialects import measure_dialects
from peers import free_port, install
from reporting import add_out, report_result
from scripted_server import ANSWER

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, KeySpec, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task

CLIENTS = (1, 64, 512)
WARM_UP_S = 3.0
"""How long each number of clients calls before it is measured."""
PEER_START_S = 10.0
"""How long LiteLLM is called after its first answer, by when all of its workers have started and answered."""
PEER = "litellm[proxy]==1.106.0"
QUESTION = [
    {"role": "system", "content": "You are an oracle. Answer in one sentence."},
    {"role": "user", "content": "What is the answer to life, the universe and everything?"},
]

Headers = dict[str, str]


async def warmed(base: str, headers: list[Headers], clients: int, seconds: float) -> dict[str, float]:
    """Measure after calls that are not measured."""
    await drive(base, headers, max(clients, 64), WARM_UP_S)
    return await drive(base, headers, clients, seconds)


async def drive(base: str, headers: list[Headers], clients: int, seconds: float) -> dict[str, float]:
    """So many clients, each asking again as soon as it has its answer; every fourth call is streamed."""
    latencies: list[float] = []
    first_texts: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()

        async def work(number: int) -> None:
            count = number
            while (asked := time.perf_counter()) - began < seconds:
                count += 1
                if count % 4:
                    await ask(session, base, headers[number % len(headers)])
                    latencies.append(time.perf_counter() - asked)
                else:
                    first_texts.append(await ask_streamed(session, base, headers[number % len(headers)]))

        await asyncio.gather(*(work(number) for number in range(clients)))
        took = time.perf_counter() - began
    latencies.sort()
    return {
        "calls": len(latencies) + len(first_texts),
        "per_s": round((len(latencies) + len(first_texts)) / took, 1),
        "p50_ms": round(latencies[len(latencies) // 2] * 1e3, 2),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1e3, 2),
        "first_text_p50_ms": round(statistics.median(first_texts) * 1e3, 2),
    }


async def ask(session: aiohttp.ClientSession, base: str, headers: Headers, messages: Any = QUESTION) -> Any:
    """Make one call that is not streamed; return the answer's document."""
    body = {"model": "model", "messages": messages}
    async with session.post(f"{base}/v1/chat/completions", json=body, headers=headers) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        assert answer["choices"][0]["message"]["content"] == ANSWER, answer
        return answer


async def ask_streamed(session: aiohttp.ClientSession, base: str, headers: Headers) -> float:
    """Make one streamed call; return the time to its first text."""
    sent, first, answer = time.perf_counter(), None, ""
    body = {"model": "model", "messages": QUESTION, "stream": True}
    async with session.post(f"{base}/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["delta"].get("content") or ""
                    if text and first is None:
                        first = time.perf_counter() - sent
                    answer += text
    assert answer == ANSWER, answer
    assert first is not None
    return first


@contextlib.contextmanager
def leyden_server(home: Path, checkout: Path = THIS) -> Iterator[tuple[str, str, int]]:
    """Run a server of a checkout: its URL, its admin key and its process id."""
    python = sys.executable if checkout == THIS else str(checkout / ".venv" / "bin" / "python")
    command = [python, str(checkout / "benchmarks" / "scripted_server.py"), str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        running = json.loads(process.stdout.readline())
        yield running["url"], Path(running["admin_key_file"]).read_text().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def litellm_server(folder: Path, workers: int) -> Iterator[str]:
    """LiteLLM's proxy with so many workers, installed first where it is not: its URL."""
    programs, port = install("litellm", [PEER]), free_port()
    parameters = {"model": "openai/model", "api_key": "none", "mock_response": ANSWER}
    config = {"model_list": [{"model_name": "model", "litellm_params": parameters}]}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [programs / "litellm", "--config", folder / "config.yaml", "--port", str(port)]
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # no keys to check: in its favour
    }
    process = subprocess.Popen(
        # uvicorn kills workers that do not answer it within 5 s, which is less than their imports take on busy cores
        [*command, "--host", "127.0.0.1", "--num_workers", str(workers), "--timeout_worker_healthcheck", "120"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def ready(base: str) -> None:
    """Wait until a server answers."""
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError, AssertionError, TimeoutError):
                await ask(session, base, {})
                return
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{base} does not answer")


async def measure_leyden(seconds: float, folder: Path) -> dict[str, Any]:
    """Rates and latencies of ours, through one pool's key as a process that hosts many rollouts has it."""
    with leyden_server(folder) as (base, key, _):
        async with Remote(base, key) as remote:
            headers = await lease_rollouts(remote)
            measured: dict[str, Any] = {str(n): await warmed(base, headers, n, seconds) for n in CLIENTS}
            summary = await remote.summarise_run("bench")
            made = sum(measured[str(n)]["per_s"] for n in CLIENTS) * seconds
            assert summary.calls >= 0.8 * made, (summary, made)
            measured["captured_calls"] = summary.calls
            measured["dialects"] = await measure_dialects(base, headers, 64, seconds)
            measured |= await late_over_early(base, headers[0])
    return measured


async def measure_dialects_alone(seconds: float, folder: Path) -> dict[str, Any]:
    """Only the rates of every dialect."""
    with leyden_server(folder) as (base, key, _):
        async with Remote(base, key) as remote:
            return await measure_dialects(base, await lease_rollouts(remote), 64, seconds)


async def lease_rollouts(remote: Remote) -> list[Headers]:
    """Lease a rollout for every client; the headers of each."""
    await remote.create_run(RunSpec("bench", RunSettings(lease_s=3600)))
    pool = await remote.create_key(KeySpec("pool"))
    await remote.enqueue("bench", GroupSpec("g", Task("t", None), size=max(CLIENTS)))
    leases = await remote.lease(LeaseRequest("w", count=max(CLIENTS), pool=pool.pool))
    return [
        {"authorization": f"Bearer {pool.key}", "baggage": f"leyden.attempt={lease.attempt.id}"} for lease in leases
    ]


async def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare two checkouts."""
    with (
        leyden_server(folder / "this", options.checkout) as (base, key, pid),
        leyden_server(folder / "other", options.against) as (other_base, other_key, other_pid),
    ):
        async with CompatibleRemote(base, key) as remote, CompatibleRemote(other_base, other_key) as other_remote:
            headers, other_headers = await lease_rollouts(remote), await lease_rollouts(other_remote)

            def round_of(base: str, headers: list[Headers], pid: int, clients: int) -> Any:
                async def operations() -> int:
                    return int((await drive(base, headers, clients, options.seconds))["calls"])

                async def measured() -> Measured:
                    return await measure(pid, operations)

                return measured

            ratios = {}
            for clients in CLIENTS:
                this = round_of(base, headers, pid, clients)
                ratios[str(clients)] = await alternate(
                    this, round_of(other_base, other_headers, other_pid, clients), options.rounds
                )
            return ratios


async def late_over_early(base: str, headers: Headers) -> dict[str, float]:
    """Return the time of turn 20 over that of turn 2, medians of many conversations that grow to 16,000 tokens."""
    tokens = 0
    early, late = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(15):
            messages: list[Any] = [{"role": "system", "content": f"Conversation {number}."}]
            for turn in range(1, 21):
                messages.append({"role": "user", "content": f"Turn {turn}. " + "Tell me about 7 and 9. " * 76})
                asked = time.perf_counter()
                answer = await ask(session, base, headers, messages)
                took = time.perf_counter() - asked
                if turn in (2, 20):
                    (early if turn == 2 else late).append(took)
                messages.append(answer["choices"][0]["message"])
                tokens = answer["usage"]["prompt_tokens"]
    ratio = round(statistics.median(late) / statistics.median(early), 2)
    return {"late_turn_over_early": ratio, "late_turn_tokens": tokens}


async def measure_litellm(seconds: float, folder: Path, workers: int) -> dict[str, Any]:
    """Measure the same of LiteLLM."""
    with litellm_server(folder, workers) as base:
        await ready(base)
        await drive(base, [{}], 64, PEER_START_S)
        return {"workers": workers, **{str(n): await warmed(base, [{}], n, seconds) for n in CLIENTS}}


def print_dialects(dialects: dict[str, Any]) -> None:
    """Print a line for each dialect, streamed and not."""
    for name, values in dialects.items():
        print(f"{64:>8} {name:24}" + "  ".join(f"{what} {value}" for what, value in values.items()))


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of clients")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of LiteLLM (default: one a core)")
    parser.add_argument("--dialects", action="store_true", help="measure only the dialects, without LiteLLM")
    add_against(parser)
    add_out(parser)
    options = parser.parse_args()
    if options.dialects:
        with tempfile.TemporaryDirectory() as folder:
            dialects = asyncio.run(measure_dialects_alone(options.seconds, Path(folder)))
        print_dialects(dialects)
        report_result({"clients": 64, "dialects": dialects}, options.out, "dialects")
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.against:
            result = asyncio.run(compare(options, Path(folder)))
            report_result(result, options.out, "against", checkouts=commits(options))
            return
        ours = asyncio.run(measure_leyden(options.seconds, Path(folder)))
        theirs = asyncio.run(measure_litellm(options.seconds, Path(folder), options.workers))
    print(f"{'clients':>8} {'':20}{'leyden':>10}{'litellm':>10}{'ratio':>8}")
    for clients in map(str, CLIENTS):
        for name, value in ours[clients].items():
            other = theirs[clients][name]
            print(f"{clients:>8} {name:20}{value:>10}{other:>10}{value / other:>8.2f}")
    print_dialects(ours["dialects"])
    print(f"turn 20 ({ours['late_turn_tokens']} tokens) over turn 2: {ours['late_turn_over_early']}")
    ratio = round(ours["64"]["per_s"] / theirs["64"]["per_s"], 1)
    latency = round(ours["64"]["p50_ms"] / theirs["64"]["p50_ms"], 2)
    result = {"ratio": ratio, "latency_ratio": latency, "leyden": ours, "litellm": theirs}
    report_result(result, options.out, peer=PEER)


if __name__ == "__main__":
    main()
