"""Agents of real frameworks whose tool raises, or not, as the model asks; each imports its framework when it is run."""

import asyncio
from typing import Any

ASKED = "Work it out."


def divide(a: int, b: int) -> int:
    """Divide two numbers."""
    if b == 0:
        raise ValueError("nothing can be divided by zero")
    return a // b


async def solve(task: dict[str, Any]) -> float:
    """The agent that the task names."""
    match task["agent"]:
        case "graph":
            return await asyncio.to_thread(graph)
        case "openai_agents":
            return await openai_agents()
        case "autogen":
            return await autogen()
        case "anthropic_client":
            return await asyncio.to_thread(anthropic_client)
        case other:
            raise ValueError(other)


def graph() -> float:
    """LangGraph's agent, whose tools' errors are answered by its ToolNode."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import ToolNode, create_react_agent

    node = ToolNode([divide], handle_tool_errors=True)
    agent = create_react_agent(ChatOpenAI(model="any", max_retries=0), node)
    agent.invoke({"messages": [("user", ASKED)]})
    return 1.0


async def openai_agents() -> float:
    """The OpenAI Agents SDK, which tells the model of a tool's error in words of its own."""
    from agents import Agent, Runner, function_tool

    agent = Agent(name="divider", model="any", tools=[function_tool(divide)])
    await Runner.run(agent, ASKED)
    return 1.0


async def autogen() -> float:
    """AutoGen's assistant, which gives the model the bare text of a tool's exception."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model="gpt-4o-mini", max_retries=0)
    agent = AssistantAgent("divider", client, tools=[divide], max_tool_iterations=4)
    await agent.run(task=ASKED)
    return 1.0


def anthropic_client() -> float:
    """A loop of one's own over Anthropic's client, which says of a result that it is an error."""
    from anthropic import Anthropic

    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools: Any = [{"name": "divide", "input_schema": schema}]
    messages: Any = [{"role": "user", "content": ASKED}]
    with Anthropic(max_retries=0) as client:
        while True:
            answer = client.messages.create(model="any", max_tokens=500, messages=messages, tools=tools)
            asked = [block for block in answer.content if block.type == "tool_use"]
            if not asked:
                return 1.0
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": [_run(block) for block in asked]})


def _run(asked: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": asked.id}
    try:
        return {**result, "content": str({"divide": divide}[asked.name](**asked.input))}
    except Exception as error:
        return {**result, "content": str(error), "is_error": True}
