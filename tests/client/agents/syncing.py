"""Sync agents that run async code in an event loop of their thread, with an object at module level that all share."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

shared = asyncio.Event()  # it belongs to the event loop that waits for it first
mine = threading.local()
running: set[int] = set()


def share(task: dict[str, Any]) -> float:
    """Keep one event loop for each thread, as `run_sync` of some frameworks does; return how many run meanwhile."""
    if not hasattr(mine, "loop"):
        mine.loop = asyncio.new_event_loop()
    running.add(threading.get_ident())
    try:
        return float(mine.loop.run_until_complete(_wait()))
    finally:
        running.discard(threading.get_ident())


async def _wait() -> int:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await shared.wait()
    return len(running)


def fail(task: dict[str, Any]) -> float:
    """Fail with an error of its own, which another process does not help against."""
    loop = asyncio.new_event_loop()
    loop.close()
    loop.call_soon(print)
    return 1.0


def ask(task: dict[str, Any]) -> float:
    """The OpenAI Agents SDK, whose model client is shared by all agents of a process."""
    from agents import Agent, Runner

    speaker = Agent(name="speaker", instructions="Say it.", model="any")
    return float(Runner.run_sync(speaker, f"Say number {task['n']}").final_output)
