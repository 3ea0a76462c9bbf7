"""Three agents whose calls share their prompts in three ways, for `benchmarks/tree.py`; recorded by `tree_record.py`.

What the model says decides what they do only as far as it says something usable: a model of two million parameters
need not be good at any of this for its calls to have the shape of an agent's.
"""

import json
from typing import Any

from openai import OpenAI

client = OpenAI()
_SHELF = [
    "The depot at {0} opened in {1}. It holds {2} pallets in {3} samples, and a crew of {4} works there in two shifts. "
    "Goods for the north leave by rail every second evening; what is left over goes by road on the following day. "
    "The manager keeps a ledger in which every pallet has a line with its number, its weight and its destination.",
    "In {1} the council of {0} counted {2} houses, {3} mills and {4} bridges. The mills stood along the river, and "
    "most of the bridges were of timber until the flood took them. A stone bridge was built with money that the "
    "guilds had lent, and its toll paid for the lamps in the market square for a generation.",
    "{0} is a station of the coastal line, {3} kilometres from its end. Of the {2} travellers of a usual day about "
    "{4} change there for the ferry. The building was finished in {1}; a plate beside the clock names its architect. "
    "The buffet closed when the express stopped calling, and the room is now a small museum of signals.",
]
_TOWNS = ["Aldmoor", "Brink", "Corvey", "Dunhelm", "Eastray", "Farrow", "Glaston", "Harwick", "Iver", "Jarrow"]
_LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Search the archive and read the passage that fits best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for"}},
            "required": ["query"],
        },
    },
}
_SCHEMA = """\
CREATE TABLE depot (id INTEGER PRIMARY KEY, town TEXT NOT NULL, opened INTEGER, samples INTEGER, crew INTEGER);
CREATE TABLE pallet (id INTEGER PRIMARY KEY, depot INTEGER REFERENCES depot(id), weight REAL, destination TEXT);
CREATE TABLE train (id INTEGER PRIMARY KEY, depot INTEGER REFERENCES depot(id), leaves TEXT, wagons INTEGER);
CREATE TABLE load (train INTEGER REFERENCES train(id), pallet INTEGER REFERENCES pallet(id), wagon INTEGER);"""
_ROLES = {
    "writer": "You write SQLite queries. Answer with one query for the question and nothing else.",
    "checker": "You check SQLite queries. Say what is wrong with the query and its result, or THE QUERY IS RIGHT.",
    "rewriter": "You correct SQLite queries. Answer with a better query for the question and nothing else.",
}


def ten_turns(task: dict[str, Any]) -> float:
    """Return a conversation of ten calls, each of which reads one passage more."""
    system = (
        "You answer questions about old towns with the help of an archive. Look things up before you answer, one "
        "thing at a time, and name the passages that you used. If a passage does not help, ask for another."
    )
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": task["question"]}]
    for turn in range(10):
        answer = client.chat.completions.create(model="any", messages=messages, tools=[_LOOK_UP], max_tokens=48)
        reply = answer.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        found = _passage(f"{task['question']} {reply.content} {turn}", turn)
        if reply.tool_calls:
            messages += [{"role": "tool", "tool_call_id": used.id, "content": found} for used in reply.tool_calls]
        else:
            messages.append({"role": "user", "content": f"Passage {turn + 1}: {found} Go on."})
    return 0.0


def three_roles(task: dict[str, Any]) -> float:
    """Have a query written, checked and corrected, twice, by three roles with their own prompts."""
    query, remark = _ask("writer", task, ""), ""
    for _ in range(2):
        samples = json.dumps([[town, 1900 + len(query) % 90] for town in _TOWNS[: len(query) % 7]])
        remark = _ask("checker", task, f"Query: {query}\nResult: {samples}")
        query = _ask("rewriter", task, f"Query: {query}\nResult: {samples}\nRemark: {remark}")
    return 0.0


def one_turn(task: dict[str, Any]) -> float:
    """Ask one question and take one answer."""
    _ask("writer", task, "")
    return 0.0


def _ask(role: str, task: dict[str, Any], more: str) -> str:
    messages: Any = [
        {"role": "system", "content": f"{_ROLES[role]}\n\nThe tables are:\n{_SCHEMA}"},
        {"role": "user", "content": f"Question: {task['question']}\n{more}".strip()},
    ]
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=64)
    return answer.choices[0].message.content or ""


def _passage(query: str, turn: int) -> str:
    number = sum(map(ord, query))
    numbers = [1600 + number % 300, 10 + number % 900, 3 + number % 40, 2 + number % 17]
    return _SHELF[turn % len(_SHELF)].format(_TOWNS[number % len(_TOWNS)], *numbers)
