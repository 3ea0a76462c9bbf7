"""Agents with clients of their own at module level, as agents are written."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import AsyncOpenAI, OpenAI

client = OpenAI(max_retries=0)
async_client = AsyncOpenAI(max_retries=0)
pool = ThreadPoolExecutor(4)


def ask(number: int) -> int:
    question: Any = [{"role": "user", "content": f"Say number {number}"}]
    return int(client.chat.completions.create(model="any", messages=question).choices[0].message.content or "")


async def ask_async(number: int) -> int:
    question: Any = [{"role": "user", "content": f"Say number {number}"}]
    answer = await async_client.chat.completions.create(model="any", messages=question)
    return int(answer.choices[0].message.content or "")


def ask_streaming(number: int) -> int:
    question: Any = [{"role": "user", "content": f"Say number {number}"}]
    pieces = client.chat.completions.create(model="any", messages=question, stream=True)
    return int("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))


def solve(task: dict[str, int]) -> dict[str, list[int]]:
    """Asks here, in a pool that outlives it, streaming, and in a thread that it starts."""
    if "lonely" in task:
        lonely()
    n = task["n"]
    said = [ask(n), pool.submit(ask, n).result(), ask_streaming(n)]
    thread = threading.Thread(target=lambda: said.append(ask(n)))
    thread.start()
    thread.join()
    return {"said": said}


async def solve_async(task: dict[str, int]) -> dict[str, list[int]]:
    """Asks twice, in tasks, in a thread of asyncio's and in one of the event loop's executor."""
    n, loop = task["n"], asyncio.get_running_loop()
    said = await asyncio.gather(
        ask_async(n), ask_async(n), asyncio.to_thread(ask, n), loop.run_in_executor(None, ask, n)
    )
    return {"said": list(said)}


def lonely() -> None:
    """Asks without any context: from a thread that was there before."""
    errors: list[BaseException] = []

    def later() -> None:
        try:
            ask(1)
        except Exception as error:
            errors.append(error)

    _errands.append(later)
    while not errors:
        time.sleep(0.01)
    raise errors[0]


_errands: list[Any] = []


def _run_errands() -> None:
    while True:
        if _errands:
            _errands.pop()()
        time.sleep(0.01)


threading.Thread(target=_run_errands, daemon=True).start()


def reward(task: dict[str, int], result: dict[str, list[int]]) -> float:
    return float(result["said"] == [task["n"]] * 4)
