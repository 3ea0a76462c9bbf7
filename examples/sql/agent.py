"""Answers questions about a SQLite database with SQL: a LangGraph agent of three roles. It knows nothing of Leyden.

A writer proposes a query, a checker judges it with the rows or the error that it gave, a rewriter repairs it, until the
checker accepts a query or `MAX_QUERIES` were tried. `OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model it talks to,
as for any such agent.

The three roles begin with the same description of the database, so that a server with a prefix cache reads it once.
"""

import asyncio
import os
import re
from typing import Any, TypedDict

from execution import QueryError, execute
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from schema import describe, show_value

MAX_QUERIES = 3
MAX_TOKENS = 256
ROWS_SHOWN = 5
SYSTEM = """A SQLite database has these tables, each with its first rows:

{schema}

{instruction}"""
INSTRUCTIONS = {
    "writer": "You are the writer. Write one SQLite query that answers the user's question with exactly the columns "
    "that it asks for, no more and no fewer. Reply with only the query, in a ```sql block.",
    "checker": "You are the checker. Judge whether a query answers the user's question: look at its tables, joins, "
    "conditions, columns and order, and at what it returned. Say in one or two sentences what is wrong, if anything. "
    "Then end with one line: VERDICT: CORRECT or VERDICT: WRONG.",
    "rewriter": "You are the rewriter. The query of a colleague does not answer the user's question. Write one SQLite "
    "query that does, with exactly the columns that it asks for. Reply with only the query, in a ```sql block.",
}
REQUESTS = {
    "writer": "Question: {question}",
    "checker": "Question: {question}\n\nQuery:\n{query}\n\nIt returned:\n{outcome}",
    "rewriter": "Question: {question}\n\nQuery:\n{query}\n\nIt returned:\n{outcome}\n\nThe checker said:\n{criticism}",
}
FENCED = re.compile(r"```(?:\w*sql\w*)?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
PLAIN = re.compile(r"\b(?:SELECT\b|WITH\s+\w+\s+AS\b).*?(?=\n\s*\n|\Z)", re.DOTALL | re.IGNORECASE)
STATEMENT = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^;])*")
VERDICT = re.compile(r"\b(CORRECT|INCORRECT|WRONG)\b", re.IGNORECASE)

model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "sql"), max_completion_tokens=MAX_TOKENS)


class State(TypedDict, total=False):
    """What the roles share."""

    question: str
    database: str
    query: str
    queries: int
    """How many were tried."""
    outcome: str
    """What the latest query returned, as the model reads it."""
    failed: bool
    criticism: str
    accepted: bool


async def ask(role: str, state: State) -> str:
    """Have the model act in a role."""
    system = SYSTEM.format(schema=describe(state["database"]), instruction=INSTRUCTIONS[role])
    answer = await model.ainvoke([SystemMessage(system), HumanMessage(REQUESTS[role].format(**state))])
    return str(answer.content)


async def write(state: State) -> State:
    """Propose a query."""
    return {"query": parse_query(await ask("writer", state)), "queries": 1}


async def run(state: State) -> State:
    """Execute the latest query."""
    outcome, failed = await asyncio.to_thread(show_outcome, state["database"], state["query"])
    return {"outcome": outcome, "failed": failed}


async def check(state: State) -> State:
    """Judge the latest query. One that failed is never accepted."""
    criticism = await ask("checker", state)
    return {"criticism": criticism, "accepted": not state["failed"] and parse_verdict(criticism)}


async def rewrite(state: State) -> State:
    """Repair the latest query."""
    return {"query": parse_query(await ask("rewriter", state)), "queries": state["queries"] + 1}


def after_run(state: State) -> str:
    """The last query that may be tried is the answer: nothing could follow from judging it."""
    return END if state["queries"] >= MAX_QUERIES else "checker"


def after_check(state: State) -> str:
    """Stop at a query that the checker accepts."""
    return END if state["accepted"] else "rewriter"


def build() -> Any:
    """The graph, compiled."""
    graph = StateGraph(State)
    graph.add_node("writer", write)
    graph.add_node("database", run)
    graph.add_node("checker", check)
    graph.add_node("rewriter", rewrite)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "database")
    graph.add_conditional_edges("database", after_run, ["checker", END])
    graph.add_conditional_edges("checker", after_check, ["rewriter", END])
    graph.add_edge("rewriter", "database")
    return graph.compile()


graph = build()


async def solve(task: dict[str, Any]) -> str:
    """The query that the agent settles on."""
    final = await graph.ainvoke({"question": task["question"], "database": task["database"]})
    return str(final["query"])


def show_outcome(database: str, query: str) -> tuple[str, bool]:
    """What a query returned, in a few lines, and whether it failed."""
    try:
        columns, rows = execute(database, query)
    except QueryError as error:
        return f"Error: {error}", True
    lines = [", ".join(map(show_value, row)) for row in rows[:ROWS_SHOWN]]
    if len(rows) > ROWS_SHOWN:
        lines.append("...")
    return "\n".join([f"columns: {', '.join(columns)}; rows: {len(rows)}", *lines]), False


def parse_query(text: str) -> str:
    """The first SQL statement of an answer: from a fenced block, or plain between other paragraphs."""
    blocks = [block.strip() for block in FENCED.findall(text) if block.strip()]
    plain = PLAIN.search(text)
    found = blocks[0] if blocks else plain.group() if plain else text
    return str(STATEMENT.findall(found.strip())[0]).strip()


def parse_verdict(text: str) -> bool:
    """The last verdict in an answer; without one the query stands."""
    verdicts = VERDICT.findall(text)
    return not verdicts or str(verdicts[-1]).upper() == "CORRECT"
