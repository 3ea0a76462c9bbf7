"""AutoGen: an agent whose tool is another agent, and a team of two that take turns; their client is at module level."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(model="gpt-4o-mini", max_retries=0, parallel_tool_calls=False)


async def solve(task: dict[str, Any]) -> float:
    """The boss asks the clerk, and has the last word."""
    clerk = AssistantAgent("clerk", client, system_message="Look it up.")
    boss = AssistantAgent("boss", client, tools=[AgentTool(clerk)], system_message="Boss.", reflect_on_tool_use=True)
    result = await boss.run(task=f"Say number {task['n']}")
    return float(result.messages[-1].to_text())


async def discuss(task: dict[str, Any]) -> float:
    """The writer writes, and the critic has the last word; streamed."""
    writer = AssistantAgent("writer", client, system_message="Write.", model_client_stream=True)
    critic = AssistantAgent("critic", client, system_message="Judge.", model_client_stream=True)
    team = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(3))
    said: list[Any] = [message async for message in team.run_stream(task=f"Say number {task['n']}")]
    return float(said[-1].messages[-1].to_text())
