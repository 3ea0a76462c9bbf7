"""A LangGraph of two nodes, each with its own model call, sync and async."""

from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

import leyden


class State(TypedDict):
    n: int
    plan: str
    answer: str


model = ChatOpenAI(model="any", max_retries=0)


def plan(state: State) -> dict[str, Any]:
    said = str(model.invoke(f"Say number {state['n']}").content)
    leyden.reward(0.25, name="planned")
    return {"plan": said}


def act(state: State) -> dict[str, Any]:
    with leyden.span("look", place="here"):
        return {"answer": str(model.invoke(f"Say number {state['n'] + 1}").content)}


async def plan_async(state: State) -> dict[str, Any]:
    return {"plan": str((await model.ainvoke(f"Say number {state['n']}")).content)}


async def act_async(state: State) -> dict[str, Any]:
    return {"answer": str((await model.ainvoke(f"Say number {state['n'] + 1}")).content)}


def build(plan: Any, act: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("planner", plan)
    graph.add_node("actor", act)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "actor")
    graph.add_edge("actor", END)
    return graph.compile()


sync_graph, async_graph = build(plan, act), build(plan_async, act_async)


def solve(task: dict[str, int]) -> Any:
    return solve_async(task["n"]) if task["async"] else float(sync_graph.invoke({"n": task["n"]})["answer"])


async def solve_async(n: int) -> float:
    return float((await async_graph.ainvoke({"n": n}))["answer"])
