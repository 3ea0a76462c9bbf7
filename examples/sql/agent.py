"""Answers questions about a SQLite database with SQL: a LangGraph agent of three roles. It knows nothing of Leyden.

A writer proposes a query, a checker judges it with the rows or the error that it gave, a rewriter repairs it, until the
checker accepts a query or `MAX_QUERIES` were tried. `OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model it talks to,
as for any such agent.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, TypedDict

from execution import QueryError, Rows, execute
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from prompts import PROMPTS
from schema import SAMPLE_ROWS, describe, show_value

MAX_QUERIES = 3
MAX_TOKENS = 256
ROWS_SHOWN = 5
FENCED = re.compile(r"```(?:\w*sql\w*)?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
PLAIN = re.compile(r"\b(?:SELECT\b|WITH\s+\w+\s+AS\b).*?(?=\n\s*\n|\Z)", re.DOTALL | re.IGNORECASE)
STATEMENT = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^;])*")
VERDICT = re.compile(r"\b(CORRECT|INCORRECT|WRONG)\b", re.IGNORECASE)

model = ChatOpenAI(
    model=os.environ.get("OPENAI_MODEL", "sql"),
    max_completion_tokens=MAX_TOKENS,
    temperature=float(os.environ.get("OPENAI_TEMPERATURE", 1)),
)


class State(TypedDict, total=False):
    """What the roles share."""

    question: str
    database: str
    schema: str
    """The description of the database."""
    query: str
    queries: int
    """How many were tried."""
    outcome: str
    """What the latest query returned, as the model reads it."""
    failed: bool
    criticism: str
    accepted: bool


class Roles:
    """The nodes of the graph that talk to the model, each with its prompt."""

    def __init__(self, prompts: dict[str, ChatPromptTemplate]) -> None:
        self._prompts = prompts

    async def _ask(self, role: str, state: State) -> str:
        answer = await model.ainvoke(self._prompts[role].format_messages(**state))
        return str(answer.content)

    async def write(self, state: State) -> State:
        """Propose a query."""
        return {"query": parse_query(await self._ask("writer", state)), "queries": 1}

    async def check(self, state: State) -> State:
        """Judge the latest query. One that failed is never accepted."""
        criticism = await self._ask("checker", state)
        return {"criticism": criticism, "accepted": not state["failed"] and parse_verdict(criticism)}

    async def rewrite(self, state: State) -> State:
        """Repair the latest query."""
        return {"query": parse_query(await self._ask("rewriter", state)), "queries": state["queries"] + 1}


@tool
def query_database(database: str, query: str) -> Rows:
    """Execute a query on a SQLite database."""
    return execute(database, query)


async def run(state: State) -> State:
    """Execute the latest query."""
    try:
        result = await query_database.ainvoke({"database": state["database"], "query": state["query"]})
    except QueryError as error:
        return {"outcome": f"Error: {error}", "failed": True}
    return {"outcome": show_rows(*result), "failed": False}


def after_run(state: State) -> str:
    """The last query that may be tried is the answer: nothing could follow from judging it."""
    return END if state["queries"] >= MAX_QUERIES else "checker"


def after_check(state: State) -> str:
    """Stop at a query that the checker accepts."""
    return END if state["accepted"] else "rewriter"


def build(prompts: dict[str, ChatPromptTemplate]) -> Any:
    """Return the graph, compiled."""
    graph, roles = StateGraph(State), Roles(prompts)
    graph.add_node("writer", roles.write)
    graph.add_node("database", run)
    graph.add_node("checker", roles.check)
    graph.add_node("rewriter", roles.rewrite)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "database")
    graph.add_conditional_edges("database", after_run, ["checker", END])
    graph.add_conditional_edges("checker", after_check, ["rewriter", END])
    graph.add_edge("rewriter", "database")
    return graph.compile()


graph = build(PROMPTS)


async def solve(task: dict[str, Any]) -> str:
    """Return the query that the agent settles on."""
    return await answer(graph, task, SAMPLE_ROWS)


async def answer(graph: Any, task: dict[str, Any], sample_rows: int) -> str:
    """Return the query that a graph settles on, where its model sees so many rows of each table."""
    schema = describe(task["database"], sample_rows)
    final = await graph.ainvoke({"question": task["question"], "database": task["database"], "schema": schema})
    return str(final["query"])


def show_rows(columns: Sequence[str], rows: Sequence[Any]) -> str:
    """Return what a query returned, in a few lines."""
    lines = [", ".join(map(show_value, row)) for row in rows[:ROWS_SHOWN]]
    if len(rows) > ROWS_SHOWN:
        lines.append("...")
    return "\n".join([f"columns: {', '.join(columns)}; rows: {len(rows)}", *lines])


def parse_query(text: str) -> str:
    """Return the first SQL statement of an answer: from a fenced block, or plain between other paragraphs."""
    blocks = [block.strip() for block in FENCED.findall(text) if block.strip()]
    plain = PLAIN.search(text)
    found = blocks[0] if blocks else plain.group() if plain else text
    return str(STATEMENT.findall(found.strip())[0]).strip()


def parse_verdict(text: str) -> bool:
    """Return the last verdict in an answer; without one the query stands."""
    verdicts = VERDICT.findall(text)
    return not verdicts or str(verdicts[-1]).upper() == "CORRECT"
