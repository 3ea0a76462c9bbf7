"""The OpenAI Agents SDK: a hand-off to an agent that has a function and another agent as tools; all at module level."""

from typing import Any

from agents import Agent, Runner, function_tool
from openai import AsyncOpenAI

client = AsyncOpenAI(max_retries=0)


@function_tool
async def look_up(n: int) -> str:
    """Look a number up."""
    question: Any = [{"role": "user", "content": f"Say number {n}"}]
    return str((await client.chat.completions.create(model="any", messages=question)).choices[0].message.content)


clerk = Agent(name="clerk", instructions="Look it up.", model="any")
asks_clerk = clerk.as_tool("ask_clerk", "Ask the clerk.")
boss = Agent(name="boss", instructions="Boss.", tools=[look_up, asks_clerk], model="any")
triage = Agent(name="triage", instructions="Hand it over.", handoffs=[boss], model="any")


async def solve(task: dict[str, Any]) -> float:
    """Streamed."""
    result = Runner.run_streamed(triage, f"Say number {task['n']}")
    async for _ in result.stream_events():
        pass
    return float(result.final_output)
