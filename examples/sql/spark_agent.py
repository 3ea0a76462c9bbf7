"""The agent of `agent.py` with short prompts, for the bundled model of two million parameters."""

from typing import Any

from agent import answer, build
from langchain_core.prompts import ChatPromptTemplate

SYSTEM = "You write SQLite queries. Reply with one SELECT statement and nothing else."
ASKED = [("system", SYSTEM), ("human", "{schema}\n{question}")]
TRIED = [*ASKED, ("ai", "{query}")]
PROMPTS = {
    "writer": ChatPromptTemplate(ASKED),
    "checker": ChatPromptTemplate([("system", "Is the query CORRECT or WRONG?"), *TRIED[1:], ("human", "{outcome}")]),
    "rewriter": ChatPromptTemplate([*TRIED, ("human", "The query failed. {outcome}")]),
}

graph = build(PROMPTS)


async def solve(task: dict[str, Any]) -> str:
    """Return the query that the agent settles on."""
    return await answer(graph, task, sample_rows=0)
