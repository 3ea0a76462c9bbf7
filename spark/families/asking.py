"""How spark is asked and how it answers: the tools on offer as real frameworks describe them, and styles of answers.

What a tool and its parameter are called changes from conversation to conversation, up to names that mean nothing, so
that the only way to call a tool rightly is to read the offer.
"""

import re
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple

from corpus import words

from families.problem import Message, chance

Style = Literal["hash", "plain", "terminate", "label"]
"""After ####; in words; in words and then TERMINATE; after `Answer:`."""
WORDS = tuple((Path(__file__).parents[1] / "words.txt").read_text(encoding="utf-8").split())


class Offer(NamedTuple):
    """The tools of a conversation, and which of them is the one to use."""

    tools: list[dict[str, Any]]
    name: str
    parameter: str
    operations: dict[str, tuple[str, str, str]] = {}  # noqa: RUF012
    """Where each operation is a tool of its own: its name and its two parameters."""
    talks: bool = False
    """Whether calls come with a sentence."""


class Kind(NamedTuple):
    """What a family's tool may be called."""

    plain: tuple[str, str, str]
    """Name, parameter and description as the examples have them."""
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    descriptions: tuple[str, ...]


KINDS = {
    "arithmetic": Kind(
        ("calculator", "expression", "Evaluate an arithmetic expression."),
        ("calculator", "calculate", "compute", "evaluate", "math", "solve", "do_math", "run_calculation", "calc"),
        ("expression", "expr", "formula", "input", "query", "text", "calculation", "problem"),
        (
            "Evaluate an arithmetic expression.",
            "Do one calculation.",
            "Calculate the value of an expression.",
            "A calculator for numbers and + - * / ( ).",
            "Evaluate a math expression and return the result as a string.",
        ),
    ),
    "sql": Kind(
        ("execute", "query", "Run a SQL query and return the rows."),
        ("execute", "execute_sql", "run_query", "query", "sql", "sql_db_query", "database", "run_sql", "ask_database"),
        ("query", "sql", "statement", "q", "command", "input", "select"),
        (
            "Run a SQL query and return the rows.",
            "Execute a query on the database.",
            "Execute a SELECT statement and get the rows or an error message.",
            "Query the SQLite database.",
        ),
    ),
    "lookup": Kind(
        ("search", "query", "Search the documents."),
        ("search", "lookup", "find", "search_documents", "retrieve", "wiki", "search_wiki", "find_page", "look_up"),
        ("query", "q", "text", "key", "question", "term", "input", "title"),
        (
            "Search the documents.",
            "Look up a name.",
            "Search for a person, a book or a company.",
            "Find the documents that are nearest to the query.",
        ),
    ),
}
OTHERS = (
    ("get_weather", "Get the current weather in a city.", {"city": "string"}),
    ("get_time", "Get the current time.", {}),
    ("read_page", "Read a page by its title.", {"title": "string", "full": "boolean"}),
    ("send_message", "Send a message to a person.", {"to": "string", "message": "string"}),
    ("list_tables", "List the tables of the database.", {}),
    ("get_schema", "Get the columns of a table.", {"table_name": "string"}),
    ("translate", "Translate a text into another language.", {"text": "string", "language": "string"}),
    ("set_timer", "Start a timer.", {"minutes": "integer"}),
)
OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
PARTS = (
    *(
        "tool",
        "docs",
        "db",
        "sql",
        "eval",
        "expr",
        "arg",
        "query",
        "fetch",
        "wiki",
        "wikipedia",
        "python",
        "api",
        "str",
    ),
    *("run", "get", "calc", "id", "stmt", "func", "web", "person", "sqlite", "string", "code", "input", "kb"),
)
"""What programmers make names of, beside words."""
FORMS = ("openai", "bare", "langchain", "agents", "autogen")


def described(form: str, name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    """Return a tool as one of the common clients sends it."""
    properties: dict[str, Any] = {}
    for parameter, kind in parameters.items():
        spoken = parameter.replace("_", " ")
        properties[parameter] = {
            "openai": {"type": kind, "description": f"The {spoken}."},
            "bare": {"type": kind},
            "langchain": {"type": kind},
            "agents": {"title": spoken.title(), "type": kind},
            "autogen": {"description": spoken, "title": spoken.title(), "type": kind},
        }[form]
    required = list(properties)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if form == "langchain":
        function["parameters"] = {"properties": properties, "required": required, "type": "object"}
    elif form == "agents":
        schema = {"properties": properties, "required": required, "title": f"{name}_args", "type": "object"}
        function["parameters"] = {**schema, "additionalProperties": False}
        function["strict"] = True
    elif form == "autogen":
        schema["additionalProperties"] = False
        function["strict"] = False
    return {"type": "function", "function": function}


def plain_offer(family: str) -> Offer:
    """Return the one tool of the examples."""
    name, parameter, description = KINDS[family].plain
    return Offer([described("bare", name, description, {parameter: "string"})], name, parameter)


def offer(rng: Random, family: str) -> Offer:
    """Return the tools of a conversation: in a third of cases the examples' one, otherwise anything."""
    if chance(rng, 0.33):
        return plain_offer(family)
    form = rng.choice(FORMS)
    if family == "arithmetic" and chance(rng, 0.12):
        first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
        tools = [
            described(form, name, f"{name.title()} two numbers.", {first: "number", second: "number"})
            for name in OPERATIONS.values()
        ]
        rng.shuffle(tools)
        return Offer(tools, "", "", {sign: (name, first, second) for sign, name in OPERATIONS.items()})
    kind = KINDS[family]
    name, parameter = named(rng, rng.choice(kind.names)), named(rng, rng.choice(kind.parameters))
    description = words(rng) if chance(rng, 0.2) else rng.choice(kind.descriptions)
    tools = [described(form, name, description, {parameter: "string"})]
    others = rng.sample(OTHERS, rng.choice((0, 0, 1, 2, 3)))
    for other, about, parameters in others:
        called_other = identifier(rng) if chance(rng, 0.3) else other
        if called_other not in [tool["function"]["name"] for tool in tools]:
            tools.append(described(form, called_other, about, parameters))
    rng.shuffle(tools)
    return Offer(tools, name, parameter, talks=chance(rng, 0.15))


def named(rng: Random, usual: str) -> str:
    """Return the usual name of something, with more to it, or any name at all."""
    kind = rng.random()
    if kind < 0.4:
        return usual
    if kind < 0.6:
        part = rng.choice((rng.choice(PARTS), rng.choice(WORDS)))
        return rng.choice((f"{usual}_{part}", f"{part}_{usual}", usual.title().replace("_", "")))
    return identifier(rng)


def identifier(rng: Random) -> str:
    """A name as programmers make them: of words, of parts of words, of no words at all."""
    parts = []
    for _ in range(rng.choices((1, 2, 3), (0.4, 0.45, 0.15))[0]):
        letters = "".join(rng.choices(ascii_lowercase, k=rng.randint(1, 7)))
        parts.append(rng.choice((rng.choice(WORDS), rng.choice(PARTS), letters)))
    if chance(rng, 0.12):
        parts.append(str(rng.randint(0, 99)))
    kind = rng.random()
    if kind < 0.7:
        return ("__" if chance(rng, 0.06) else "") + "_".join(parts)
    together = "".join(part.title() for part in parts)
    return together if kind < 0.85 else together[0].lower() + together[1:]


def chat_message(role: str, content: str) -> Message:
    """Return a message of text."""
    return {"role": role, "content": content}


def called(offer: Offer, *arguments: str, content: str = "") -> Message:
    """Return the tool to use, called once for each argument."""
    calls = [
        {"type": "function", "function": {"name": offer.name, "arguments": {offer.parameter: argument}}}
        for argument in arguments
    ]
    return {**chat_message("assistant", content), "tool_calls": calls}


def final(rng: Random, style: Style, value: str, sentence: str) -> str:
    """A final answer. `sentence` may have a place for the value."""
    sentence = sentence.format(value)
    if style == "hash":
        return rng.choices((f"#### {value}", f"{sentence} #### {value}"), (0.65, 0.35))[0]
    if style == "label":
        return rng.choice((f"Answer: {value}", f"{sentence} Answer: {value}"))
    answer = rng.choice((sentence, f"The answer is {value}.", value))
    return f"{answer} TERMINATE" if style == "terminate" else answer


def reply(text: str) -> str:
    """What a final answer says: all after its mark; without one, its last number if it has any."""
    text = text.strip().removesuffix("TERMINATE").strip()
    for mark in ("####", "Answer:"):
        if mark in text:
            return text.rsplit(mark, 1)[1].strip().removesuffix(".")
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else text.removesuffix(".")
