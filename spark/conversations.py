"""Whole conversations of erring teachers: what spark is taught from. The same seed gives the same conversations.

Few or many problems in one conversation, any system message or none, the tools of any framework, notes that have
nothing to do with the question: the longest fill spark's 4,096 positions.
"""

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from corpus import PROSE, SYSTEMS, words
from families import arithmetic, chat, lookup, sql
from families.asking import FORMS, Offer, Style, called, chat_message, described, final, named, offer, plain_offer
from families.problem import Message, Problem, chance, misread
from families.words import CITIES

FAMILIES: dict[str, ModuleType] = {"arithmetic": arithmetic, "sql": sql, "lookup": lookup}
SHARES = {"arithmetic": 0.38, "sql": 0.21, "lookup": 0.23, "chat": 0.08, "write": 0.05, "bare": 0.02, "weather": 0.03}
LONG = 0.04
"""How many conversations go on for thousands of tokens."""
PLAIN_SYSTEMS = {
    "arithmetic": "Use the calculator, then answer after ####.",
    "sql": "Query the database, then answer after ####.",
    "lookup": "Search, then answer after ####.",
}
"""The system messages of the examples."""
MARKED: tuple[str, ...] = (
    "Use the tools when they help. Put the final answer after ####.",
    "Solve the problem with your tool. End with #### and the answer.",
    "You are a careful assistant. Call the tool first; the final answer stands after ####.",
    "Answer in one line. Write #### before the final answer.",
)
LABELLED = (
    "Use the tool and finish with 'Answer: ' and the result.",
    "You are a helpful assistant. Use the tools. Give the result after Answer:",
)
TERMINATED = (
    "You are a helpful AI assistant. Solve tasks using your tools. "
    "Reply with TERMINATE when the task has been completed.",
    "Solve tasks with your tools. Reply with TERMINATE when you are done.",
)
FREE = (
    *SYSTEMS[:5],
    "You are a helpful AI assistant.",
    "Use your tools to answer the question.",
    "You are an agent. Think, call a tool, and answer shortly.",
    "",
)
WRITE = (
    "Write a SQL query that answers the question. Answer with the query only.",
    "You write SQLite queries. Reply with one SELECT statement and nothing else.",
    "You are a SQL expert. Given a schema and a question, write the query.",
)


class Conversation(NamedTuple):
    """Messages, the tools offered with them, and the keys of the problems in it."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    keys: list[str]


def conversation(rng: Random) -> Conversation:
    """One conversation of any kind."""
    family = rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    long = chance(rng, LONG)
    if family == "chat":
        return _talk(rng, long)
    if family in ALONE:
        return ALONE[family](rng)
    offered = offer(rng, family)
    system, style = _system(rng, family, plain=offered == plain_offer(family))
    messages: list[Message] = []
    keys: list[str] = []
    number = rng.randint(5, 22) if long else rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0]
    for _ in range(number):
        problem = FAMILIES[family].problem(rng, "teach")
        keys.append(problem.key)
        messages += _asked(rng, problem, offered, style, FAMILIES[family])
        if chance(rng, 0.05):
            messages += chat.exchange(rng)
    if system is None and style == "hash":
        messages[0]["content"] += rng.choice((" Put the final answer after ####.", " Answer after ####."))
    if long and chance(rng, 0.5):
        system = f"{system or ''}\n{_notes(rng)}".strip()
    if system is not None:
        messages = [chat_message("system", system), *messages]
    return Conversation(messages, offered.tools, keys)


def plain(family: str, problem: Problem) -> tuple[list[Message], Offer]:
    """Return a problem as the examples' agents ask it."""
    return [chat_message("system", PLAIN_SYSTEMS[family]), chat_message("user", problem.question)], plain_offer(family)


def _asked(rng: Random, problem: Problem, offered: Offer, style: Style, family: ModuleType) -> list[Message]:
    return [chat_message("user", problem.question), *family.teach(problem, rng, offered, style)]


def _system(rng: Random, family: str, plain: bool) -> tuple[str | None, Style]:
    if chance(rng, 0.7 if plain else 0.1):
        return PLAIN_SYSTEMS[family], "hash"
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(MARKED), "hash"
    if kind < 0.45:
        return rng.choice(LABELLED), "label"
    if kind < 0.55:
        return rng.choice(TERMINATED), "terminate"
    if kind < 0.65:
        return None, "hash"
    return (None if chance(rng, 0.4) else rng.choice(FREE)), "plain"


def _notes(rng: Random) -> str:
    return " ".join(rng.choice((rng.choice(PROSE), words(rng))) for _ in range(rng.randint(5, 80)))


def _talk(rng: Random, long: bool) -> Conversation:
    messages: list[Message] = []
    for _ in range(rng.randint(10, 40) if long else rng.randint(1, 3)):
        messages += chat.exchange(rng)
    if chance(rng, 0.5):
        messages = [chat_message("system", rng.choice(FREE)), *messages]
    tools = offer(rng, rng.choice(tuple(FAMILIES))).tools if chance(rng, 0.4) else []
    return Conversation(messages, tools, [])


def _write(rng: Random) -> Conversation:
    """SQL as the answer itself, and once more when it failed: what a chain of prompts around a database asks for."""
    problem = sql.problem(rng, "teach")
    parts, execute = sql.err(problem, rng), sql.tool(problem)
    messages = [chat_message("system", rng.choice(WRITE)), chat_message("user", problem.question)]
    query = sql.query(problem, parts)
    messages.append(chat_message("assistant", query))
    found = execute(query)
    if found.startswith("Error"):
        parts |= {"quotes": True, "table": problem.facts["table"]}
        messages += [
            chat_message("user", f"The query failed. {found}"),
            chat_message("assistant", sql.query(problem, parts)),
        ]
    return Conversation(messages, [], [problem.key])


def _bare(rng: Random) -> Conversation:
    """Problems without any tool: a guess for a number, and nothing known of the documents."""
    family = rng.choice(("arithmetic", "lookup"))
    problem = FAMILIES[family].problem(rng, "teach")
    answer = final(rng, "plain", misread(rng, str(problem.answer)), "I think it is {}.")
    last_message = chat_message("assistant", answer if family == "arithmetic" else "I do not know.")
    return Conversation([chat_message("user", problem.question), last_message], [], [problem.key])


def _weather(rng: Random) -> Conversation:
    """The tool of every quick start; its teachers do not err."""
    city, degrees = rng.choice(CITIES), rng.randint(-9, 39)
    name, parameter = named(rng, "get_weather"), named(rng, rng.choice(("city", "location")))
    about = rng.choice(("Get the current weather in a city.", "Get the weather.", "The weather in a city."))
    offered = Offer([described(rng.choice(FORMS), name, about, {parameter: "string"})], name, parameter)
    found = rng.choice(('{{"temperature": {}, "unit": "celsius"}}', "{} degrees", "{} degrees and clear")).format(
        degrees
    )
    asked = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "How warm is it in {} now?"))
    answer = rng.choice(("It is {} degrees in {}.", "The temperature is {} degrees in {}.")).format(degrees, city)
    messages = [
        chat_message("user", asked.format(city)),
        called(offered, city),
        chat_message("tool", found),
        chat_message("assistant", answer),
    ]
    system = [chat_message("system", rng.choice(FREE))] if chance(rng, 0.5) else []
    return Conversation([*system, *messages], offered.tools, [])


ALONE: dict[str, Callable[[Random], Conversation]] = {"write": _write, "bare": _bare, "weather": _weather}
