"""Two agents of the OpenAI Agents SDK, of which the first hands over to the second; imported when it is needed."""

from typing import Any


async def solve(task: dict[str, Any]) -> float:
    from agents import Agent, Runner

    adder = Agent(name="adder", instructions="Work it out.", model="any")
    triage = Agent(name="triage", instructions="Hand it over.", handoffs=[adder], model="any")
    result = await Runner.run(triage, f"Say number {task['n']}")
    return float(result.final_output)
