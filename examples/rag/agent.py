"""Answers questions from a corpus: an agent of the OpenAI Agents SDK with a search tool. It knows nothing of Leyden.

The agent decides itself what to search for and when it has found enough, up to `MAX_TURNS` model calls. A task names
the index: it is searched by meaning if `embeddings.py` has embedded the passages, otherwise by words.
`OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model the agent talks to.
"""

import asyncio
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agents import Agent, MaxTurnsExceeded, ModelSettings, RunContextWrapper, Runner, function_tool
from passages import Passages

INSTRUCTIONS = (
    "Answer the question from what you find. Search for one fact at a time, and again with what you learnt, until a "
    "result states the answer. Then end with #### and the answer alone, in as few words as possible."
)
INSTRUCTIONS_ALONE = "Answer the question. End with #### and the answer alone, in as few words as possible."
REMINDER = "Search again for what is still missing, or end with #### and the answer alone."
"""Ends each result of a search: small models forget the form of the answer behind long passages."""
MAX_TURNS = 6
MAX_TOKENS = 256


@dataclass
class Corpus:
    """What a run of the agent searches."""

    index: str
    passages: int
    """How many a search returns."""


@cache
def open_index(path: str) -> Any:
    """Return the passages of an index, by their embeddings where there are any."""
    if Path(path).with_suffix(".faiss").exists():
        from embeddings import EmbeddedPassages

        return EmbeddedPassages(path)
    return Passages(path)


@function_tool
async def search(context: RunContextWrapper[Corpus], query: str) -> str:
    """Search the documents."""
    corpus = context.context
    found = await asyncio.to_thread(open_index(corpus.index).search, query, corpus.passages)
    results = [f"{passage.title}: {passage.text}" for passage in found] or ["No results found."]
    return "\n\n".join([*results, REMINDER]).strip()


agent = Agent[Corpus](
    name="researcher",
    instructions=INSTRUCTIONS,
    tools=[search],
    model=os.environ.get("OPENAI_MODEL", "rag"),
    model_settings=ModelSettings(max_tokens=MAX_TOKENS, temperature=float(os.environ.get("OPENAI_TEMPERATURE", 1))),
)


async def solve(task: dict[str, Any]) -> str:
    """Return the agent's answer to a question, from what it found."""
    return await answer(agent, task)


async def solve_alone(task: dict[str, Any]) -> str:
    """Return the answer to a question, without the search: what it is worth to the model."""
    return await answer(agent.clone(instructions=INSTRUCTIONS_ALONE, tools=[]), task)


async def answer(agent: Agent[Corpus], task: dict[str, Any]) -> str:
    """Return an agent's last message; empty if it did not end."""
    corpus = Corpus(task["index"], task.get("passages", 3))
    try:
        result = await Runner.run(agent, task["question"], context=corpus, max_turns=MAX_TURNS)
    except MaxTurnsExceeded:
        return ""
    return str(result.final_output)
