"""Sampled tokens per second of the embedded engine, `model.generate`, vLLM's server, and vLLM behind the gateway.

    python benchmarks/engine_vllm.py --model FOLDER [--model FOLDER] [--requests 1 32 256 1024] [--vllm PYTHON]
    python benchmarks/engine_vllm.py --model smollm2-135m --model qwen2.5-1.5b

Every model is measured with 1, 32, 256 and 1,024 requests that arrive at once, each with its own prompt, streamed, with
token ids and logprobs, at temperature 1, all of the same lengths. The time includes the prompts, which are new in every
round. The best of several rounds counts, after one that does not. On a GPU the model is in bfloat16. The embedded
engine and `model.generate` run first, asked in this process without HTTP, and are freed; then one vLLM server is asked
over HTTP in four ways, in turns: through the gateway, with the text of each prompt as a chat message; with the same
messages on its own chat route for what the gateway records, token ids and logprobs; there for text alone, of which
nothing can be trained; and with the token ids of the prompts, which nobody has to tokenise, for token ids and logprobs.
The name of a shape instead of a folder measures the first two engines with random weights, on which speed does not
depend: nothing has to be downloaded.

The last line is one JSON object: by model and number of requests the tokens per second of each, `ratio_embedded` (the
embedded engine over vLLM with token ids), `ratio_gateway` (vLLM behind the gateway over its chat route, asked for the
same), `ratio_gateway_text` (over its chat route for text alone) and `ratio_gateway_ids` (over vLLM with token ids).
`ratio` is the smallest `ratio_gateway` of the models at 256 requests.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import torch
from engine import Ours, generate
from gpu_step_replay import Call
from gpu_step_replay import generate as generate_in_vllm
from reporting import add_out, report_result
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, KeySpec, Lease, LeaseRequest, RunSpec
from leyden.engine.vllm.http import session as vllm_session
from leyden.engine.vllm.launch import VllmOptions
from leyden.engine.vllm.process import VllmProcess
from leyden.local.engine import VLLM_STREAM_INTERVAL
from leyden.records import RunSettings, Sampling, Task
from leyden.rendering.tokenizer import Tokenizer

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SHAPES = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
}
MAX_GENERATE = 256
"""Sequences that `model.generate` computes at once."""
MAX_LEASES = 500
"""Of one request to the server, which refuses more than 1,000."""
HEADLINE = 256
"""Requests at once of the headline."""
LONGEST_S = 3600.0
VLLM_CHAT = {"model": "policy", "temperature": 1.0, "ignore_eos": True}
"""Of a request to vLLM's chat route; the gateway has these from its run and from `EndlessEngine`."""
RECORDED = {"logprobs": True, "return_token_ids": True}
"""What the gateway asks for and records with every call."""
TIMED = {
    "embedded": "in its process",
    "generate": "in its process",
    "vllm": "over HTTP",
    "vllm_chat": "over HTTP",
    "vllm_chat_text": "over HTTP",
    "gateway": "over HTTP, and the gateway asks vLLM over HTTP",
}
"""How each was asked: the two in this process save what HTTP and a server's front end cost the others."""


def best(run: Callable[[], int], expected: int, rounds: int) -> float:
    """Tokens per second of the best round, after one that does not count."""
    rates = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        sampled = run()
        rates.append(sampled / (time.perf_counter() - began))
        if sampled != expected:
            raise SystemExit(f"{sampled} tokens were sampled where {expected} were asked for")
    return round(max(rates[1:]), 1)


def measure_in_process(folder: str, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return the embedded engine and `model.generate`."""
    if folder in SHAPES:
        loaded: Any = AutoModelForCausalLM.from_config(SHAPES[folder], dtype=DTYPE)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    model = loaded.to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    rates = {}
    for requests in options.requests:
        rates[requests] = measure_model(model, requests, options)
        print(f"{folder} {requests:5} requests  {rates[requests]}", flush=True)
    return rates


def measure_model(model: Any, requests: int, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of both with so many requests."""
    expected = requests * options.tokens
    whole, ours = generate(model, torch.get_num_threads()), Ours(model, requests)

    def prompts() -> list[list[int]]:
        ids: list[list[int]] = torch.randint(0, model.config.vocab_size, (requests, options.prompt)).tolist()
        return ids

    def generate_all() -> int:
        asked = prompts()
        parts = [asked[at : at + MAX_GENERATE] for at in range(0, requests, MAX_GENERATE)]
        return sum(whole(part, options.tokens) for part in parts)

    embedded = best(lambda: ours(prompts(), options.tokens), expected, options.rounds)
    ours.engine.close()
    return {"embedded": embedded, "generate": best(generate_all, expected, options.rounds)}


def free_memory() -> None:
    """Give the memory of deleted models back to the device."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


async def one_round(run: Callable[[], Awaitable[int]], expected: int) -> float:
    """Tokens per second of one round."""
    began = time.perf_counter()
    sampled = await run()
    rate = sampled / (time.perf_counter() - began)
    if sampled != expected:
        raise SystemExit(f"{sampled} tokens were sampled where {expected} were asked for")
    return rate


async def complete(session: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str]) -> int:
    """Stream one chat completion; return its number of tokens."""
    sampled = 0
    async with session.post("/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status != 200:
            raise SystemExit(f"a call was refused: {await reply.text()}")
        async for line in reply.content:
            if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
                sampled = usage["completion_tokens"]
    return sampled


async def ask_chat(
    session: aiohttp.ClientSession, headers: Sequence[dict[str, str]], bodies: Sequence[dict[str, Any]]
) -> int:
    """Make every call at once, as a process that hosts many rollouts does; return the number of tokens."""
    return sum(await asyncio.gather(*map(complete, repeat(session), bodies, headers)))


def chat_body(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the request of one chat completion."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def lease_rollouts(remote: Remote, count: int) -> list[dict[str, str]]:
    """Lease a rollout for every request; the headers of each."""
    await remote.create_run(RunSpec("bench", RunSettings(lease_s=3600, sampling=Sampling(temperature=1.0))))
    pool = await remote.create_key(KeySpec("pool"))
    await remote.enqueue("bench", GroupSpec("g", Task("t", None), size=count))
    leases: list[Lease] = []
    while len(leases) < count:
        leases += await remote.lease(LeaseRequest("w", count=min(MAX_LEASES, count - len(leases)), pool=pool.pool))
    return [
        {"authorization": f"Bearer {pool.key}", "baggage": f"leyden.attempt={lease.attempt.id}"} for lease in leases
    ]


async def measure_vllm(folder: str, options: argparse.Namespace, home: Path) -> dict[int, dict[str, float]]:
    """vLLM's server, asked with token ids, on its chat route in two ways, and through the gateway."""
    tokenizer = Tokenizer.load(folder)
    config = AutoConfig.from_pretrained(folder)
    dtype = str(DTYPE).removeprefix("torch.")
    started = VllmOptions(Path(folder), options.vllm, dtype=dtype, arguments=tuple(options.vllm_arguments.split()))
    process = VllmProcess(started, home / "vllm.log")
    rates: dict[int, dict[str, float]] = {}
    words = [sys.executable, str(HERE / "engine_gateway.py"), str(home / "server"), folder, str(process.socket)]
    words += [str(config.max_position_embeddings), str(config.vocab_size)]
    await process.start()
    server = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        running = json.loads(await server.stdout.readline())
        key = await asyncio.to_thread(Path(running["admin_key_file"]).read_text)
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        async with (
            Remote(running["url"], key.strip()) as remote,
            aiohttp.ClientSession(running["url"], connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as gateway,
            vllm_session(str(process.socket)) as direct,
        ):
            headers = await lease_rollouts(remote, max(options.requests))
            for requests in options.requests:
                rates[requests] = {}
                for number in range(options.rounds + 1):
                    new = [random_text(tokenizer, options.prompt) for _ in range(4 * requests)]  # none is cached
                    calls = [Call(tuple(tokenizer.encode(text)), options.tokens) for text in new[::4]]
                    recorded = [chat_body(text, options.tokens, **VLLM_CHAT, **RECORDED) for text in new[1::4]]
                    text_alone = [chat_body(text, options.tokens, **VLLM_CHAT) for text in new[2::4]]
                    ours = [chat_body(text, options.tokens, model="model") for text in new[3::4]]
                    turns: dict[str, Callable[[], Awaitable[int]]] = {
                        "vllm": partial(ask_directly, direct, calls),
                        "vllm_chat": partial(ask_chat, direct, [{}] * requests, recorded),
                        "vllm_chat_text": partial(ask_chat, direct, [{}] * requests, text_alone),
                        "gateway": partial(ask_chat, gateway, headers, ours),
                    }
                    for name, run in turns.items():
                        rate = await one_round(run, requests * options.tokens)
                        if number:  # the first round does not count
                            rates[requests][name] = max(rates[requests].get(name, 0.0), round(rate, 1))
                print(f"{folder} {requests:5} requests  {rates[requests]}", flush=True)
    finally:
        server.terminate()
        await server.wait()
        await process.stop()
    return rates


async def ask_directly(session: aiohttp.ClientSession, calls: Sequence[Call]) -> int:
    """Make every call at once; `generate_in_vllm` checks the length of each."""
    await asyncio.gather(*(generate_in_vllm(session, call) for call in calls))
    return sum(call.completion_tokens for call in calls)


def random_text(tokenizer: Tokenizer, tokens: int) -> str:
    """Digits of about this many tokens."""
    text = " ".join(str(random.randrange(1000)) for _ in range(tokens))
    return tokenizer.decode(tokenizer.encode(text)[:tokens])


def main() -> None:
    """Measure every model and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="a folder or a shape; may be repeated")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens sampled for each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", default=os.environ.get("LEYDEN_VLLM_PYTHON", sys.executable), help="its interpreter")
    vllm_arguments = f"--max-num-seqs 1024 --stream-interval {VLLM_STREAM_INTERVAL}"
    parser.add_argument("--vllm-arguments", default=vllm_arguments, help="of its server")
    add_out(parser)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for folder in options.model:
        rates = measure_in_process(folder, options)
        free_memory()
        report[Path(folder).name] = rates
        if folder in SHAPES:
            continue
        with tempfile.TemporaryDirectory() as home:
            for requests, found in asyncio.run(measure_vllm(folder, options, Path(home))).items():
                rates[requests] |= found
        for found in rates.values():
            found["ratio_embedded"] = round(found["embedded"] / found["vllm"], 3)
            found["ratio_gateway"] = round(found["gateway"] / found["vllm_chat"], 3)
            found["ratio_gateway_text"] = round(found["gateway"] / found["vllm_chat_text"], 3)
            found["ratio_gateway_ids"] = round(found["gateway"] / found["vllm"], 3)
    behind = [rates[HEADLINE]["ratio_gateway"] for rates in report.values() if "gateway" in rates.get(HEADLINE, {})]
    ratio = min(behind, default=None)
    print("\n".join(f"{name:15} was asked {how}" for name, how in TIMED.items()))
    lengths = {"prompt": options.prompt, "tokens": options.tokens}
    result = {"ratio": ratio, "timed": TIMED, "tokens_per_s": report, **lengths}
    report_result(result, options.out, versions={"torch": torch.__version__})


if __name__ == "__main__":
    main()
