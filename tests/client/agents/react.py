"""LangChain's agent, a LangGraph of a model and its tools, with a tool that asks the model itself; sync and async."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="any", max_retries=0)


@tool
def look_up(n: int) -> str:
    """Look a number up."""
    return str(model.invoke(f"Say number {n}").content)


boss = create_agent(model, [look_up], system_prompt="Boss.", name="boss")


def solve(task: dict[str, Any]) -> float:
    question: Any = {"messages": [{"role": "user", "content": f"Say number {task['n']}"}]}
    return float(boss.invoke(question)["messages"][-1].content)


async def solve_async(task: dict[str, Any]) -> float:
    """The same, streamed."""
    question: Any = {"messages": [{"role": "user", "content": f"Say number {task['n']}"}]}
    states = [state async for state in boss.astream(question, stream_mode="values")]
    return float(states[-1]["messages"][-1].content)
