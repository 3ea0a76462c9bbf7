"""The agent of benchmarks/async.py: it asks, works for a time that has a heavy tail, and asks again."""

import asyncio
import math
from random import Random
from typing import Any

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def ask_and_wait(task: dict[str, Any], attempt: Any) -> float:
    """Work for as long as the name of the rollout says; the reward is drawn by lot, so that no group is flat."""
    drawn = Random(attempt.id.rpartition(".")[0])
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    answer = await client.chat.completions.create(model="m", messages=messages)
    await asyncio.sleep(task["median_s"] * math.exp(drawn.gauss(0.0, task["spread"])))
    messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
    messages += [{"role": "user", "content": "And now?"}]
    await client.chat.completions.create(model="m", messages=messages)
    return drawn.random()
