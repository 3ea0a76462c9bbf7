"""An agent of one call: it asks for a few words on a subject. Any answer that comes in time is worth 1."""

from typing import Any

from openai import AsyncOpenAI

client = AsyncOpenAI(max_retries=0)


async def solve(task: dict[str, Any]) -> float:
    """Ask the question of a task."""
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return float(bool(answer.choices[0].message.content))
