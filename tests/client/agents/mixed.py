"""Every framework in one process, in tasks and in threads, when all the rollouts are there."""

import asyncio
from typing import Any

import clients
import office
import react
import team

_together: dict[int, asyncio.Barrier] = {}


def in_thread(agent: Any) -> Any:
    return lambda task: asyncio.to_thread(agent, task)


AGENTS = {
    "team.py:solve": team.solve,
    "team.py:discuss": team.discuss,
    "react.py:solve": in_thread(react.solve),
    "react.py:solve_async": react.solve_async,
    "office.py:solve": office.solve,
    "clients.py:solve_rooted": in_thread(clients.solve_rooted),
}


async def solve(task: dict[str, Any]) -> float:
    await _together.setdefault(task["of"], asyncio.Barrier(task["of"])).wait()
    return float(await AGENTS[task["agent"]](task))
