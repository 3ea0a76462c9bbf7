"""An agent with every kind of client at module level, used from tasks and threads at once."""

import asyncio
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import requests
from openai import AsyncOpenAI, OpenAI
from opentelemetry import context, trace

client, async_client = OpenAI(max_retries=0), AsyncOpenAI(max_retries=0)
session = requests.Session()
pool = ThreadPoolExecutor(8)
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
_aiohttp: list[aiohttp.ClientSession] = []
_together: dict[int, asyncio.Barrier] = {}


def asking(number: int) -> Any:
    return {"model": "any", "messages": [{"role": "user", "content": f"Say number {number}"}]}


def answer(body: Any) -> int:
    return int(body["choices"][0]["message"]["content"])


def by_openai(number: int) -> int:
    return answer(client.chat.completions.create(**asking(number)).model_dump())


async def by_async_openai(number: int) -> int:
    return answer((await async_client.chat.completions.create(**asking(number))).model_dump())


def by_requests(number: int) -> int:
    return answer(session.post(url, json=asking(number), headers=headers).json())


async def by_aiohttp(number: int) -> int:
    if not _aiohttp:
        _aiohttp.append(aiohttp.ClientSession())
    async with _aiohttp[0].post(url, json=asking(number), headers=headers) as response:
        return answer(await response.json())


async def solve(task: dict[str, int]) -> list[int]:
    """Asks with all of them at once, when all the rollouts are here."""
    n = task["n"]
    await _together.setdefault(task["of"], asyncio.Barrier(task["of"])).wait()
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(by_requests(n)))
    thread.start()
    said += await asyncio.gather(
        by_async_openai(n),
        asyncio.create_task(by_aiohttp(n)),
        asyncio.to_thread(by_openai, n),
        asyncio.wrap_future(pool.submit(by_requests, n)),
    )
    await asyncio.to_thread(thread.join)
    return said


def solve_rooted(task: dict[str, int]) -> int:
    """Asks within a trace that is not the attempt's."""
    with trace.get_tracer("framework").start_as_current_span("root", context=context.Context()):
        return by_requests(task["n"])


async def tell(task: dict[str, str]) -> dict[str, Any]:
    """What each client tells another server, and what a process is told."""
    async with aiohttp.ClientSession() as other, other.get(task["url"]) as response:
        told = [await response.json()]
    told += await asyncio.to_thread(lambda: [httpx.get(task["url"]).json(), session.get(task["url"]).json()])
    async with httpx.AsyncClient() as client:
        told.append((await client.get(task["url"])).json())
    return {"told": told, "process": variables(), "own": variables(env={"BAGGAGE": "mine=1"})}


def variables(**options: Any) -> str:
    return subprocess.run(["env"], capture_output=True, text=True, **options).stdout
