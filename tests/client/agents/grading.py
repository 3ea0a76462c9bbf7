"""Agents that are graded by functions which are slow, or look at a whole group."""

import asyncio
import time
from pathlib import Path
from typing import Any

from leyden.episodes import Episode


def act(task: dict[str, Any], attempt: Any) -> str:
    index = int(attempt.rollout.rpartition(".")[2])
    if task.get("do") == "fail some" and index % 2 == 0:
        raise ValueError("this one falls")
    return "x" * (index + 1)


def wait_for_door(task: dict[str, Any]) -> float:
    Path(task["door"] + ".asked").touch()
    while not Path(task["door"]).exists():
        time.sleep(0.02)
    return 1.0


def rank(task: dict[str, Any], group: list[Episode]) -> list[int]:
    if task["do"] == "ill":
        raise RuntimeError("the judge is ill")
    order = sorted(episode.attempt.result for episode in group)
    return [order.index(episode.attempt.result) for episode in group]


async def rank_slowly(task: dict[str, Any], group: list[Episode]) -> list[int]:
    while not Path(task["door"]).exists():  # noqa: ASYNC110, ASYNC240 - a test opens it
        await asyncio.sleep(0.02)
    return rank(task, group)


async def block(task: dict[str, Any]) -> float:
    return wait_for_door(task)
