"""Sends the calls of a recorded step straight to a vLLM server: the same prompts, lengths, order and concurrency.

Each rollout is a coroutine that makes its calls one after another, as its agent did, without an agent's time between
them. Completions have exactly the recorded lengths (`ignore_eos`). The route is the one that Leyden uses: token ids in,
token ids and logprobs out, streamed.
"""

import asyncio
import json
import os
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from leyden.local.engine import VLLM_STREAM_INTERVAL

START_LIMIT_S = 600.0


class Call(NamedTuple):
    """One model call as it was recorded."""

    prompt_ids: tuple[int, ...]
    completion_tokens: int


@asynccontextmanager
async def vllm_server(
    python: str, model: str, log: Path, arguments: Sequence[str]
) -> AsyncIterator[aiohttp.ClientSession]:
    """Start vLLM's server on a private socket; what reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "vllm.sock"
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket), "--model", model]
        words += ["--logprobs-mode", "processed_logprobs", "--enable-prefix-caching", "--generation-config", "vllm"]
        words += ["--stream-interval", str(VLLM_STREAM_INTERVAL)]
        variables = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600", "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *words, *arguments, env={**os.environ, **variables}, stdout=output, stderr=output
            )
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout) as session:
                await _ready(session, process, log)
                yield session
        finally:
            process.terminate()
            await process.wait()


async def _ready(session: aiohttp.ClientSession, process: Process, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.returncode is None:
        with suppress(aiohttp.ClientError, OSError):
            async with session.get("/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.5)
    raise SystemExit(f"vLLM did not start: see {log}")


async def replay(session: aiohttp.ClientSession, rollouts: Sequence[Sequence[Call]], concurrency: int) -> float:
    """Make every call of every rollout; the seconds that it took."""
    slots = asyncio.Semaphore(concurrency)

    async def make(calls: Sequence[Call]) -> None:
        async with slots:
            for call in calls:
                await generate(session, call)

    warming = [Call(tuple(reversed(calls[0].prompt_ids)), 8) for calls in rollouts[:8]]
    await asyncio.gather(*(generate(session, call) for call in warming))
    began = time.perf_counter()
    await asyncio.gather(*map(make, rollouts))
    return time.perf_counter() - began


async def generate(session: aiohttp.ClientSession, call: Call) -> None:
    """Make one call and check the number of its tokens."""
    parameters = {
        "temperature": 1.0,
        "max_tokens": call.completion_tokens,
        "min_tokens": call.completion_tokens,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    body = {"token_ids": call.prompt_ids, "stream": True, "sampling_params": parameters}
    received = 0
    async with session.post("/inference/v1/generate", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"vLLM refused a call: {await response.text()}")
        async for line in response.content:
            data = line.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                received += sum(len(choice["token_ids"] or ()) for choice in json.loads(data).get("choices", ()))
    if received != call.completion_tokens:
        raise SystemExit(f"vLLM sent {received} tokens where {call.completion_tokens} were asked for")
