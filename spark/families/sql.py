"""Questions about one small table, with a tool that runs SQL in SQLite and gives rows or SQLite's own error.

The teachers err, each decision by itself: another column, another aggregate, another comparison, the wrong end of an
order, a condition left out, quotes forgotten (SQLite then complains, and some give up), a row misread, no query at
all.
"""

import json
import sqlite3
from random import Random
from typing import Any

from families.asking import Offer, Style, called, chat_message, final, reply
from families.problem import Message, Problem, Split, Tool, chance, misread, problem_of_split, weighted
from families.words import CITIES, NAMES

TABLES = (
    *("users", "orders", "products", "students", "singers", "countries", "books", "cars", "teams", "houses", "games"),
    *("shops", "trains", "animals", "plants", "songs", "films", "farms", "rooms", "lakes"),
)
NUMBERS = (
    *("age", "price", "score", "stock", "area", "weight", "height", "pages", "rooms", "speed", "length", "grade"),
    *("rating", "cost", "points", "wins", "salary", "size", "distance", "level", "hours", "members", "visits"),
)
KINDS = {
    "city": CITIES[:12],
    "color": ("red", "blue", "green", "black", "white", "brown"),
    "category": ("old", "new", "small", "large", "special"),
    "country": ("France", "Japan", "Peru", "Egypt", "Norway", "Chile"),
}
AGGREGATES = {
    "highest": {"MAX": 0.72, "MIN": 0.14, "SUM": 0.08, "AVG": 0.06},
    "lowest": {"MIN": 0.42, "MAX": 0.49, "COUNT": 0.09},
    "total": {"SUM": 0.43, "COUNT": 0.47, "MAX": 0.10},
}
COMPARISONS = {
    "above": {">": 0.62, "<": 0.22, ">=": 0.16},
    "below": {"<": 0.40, ">": 0.50, "<=": 0.10},
}
ENDS = {"highest": {"DESC": 0.62, "ASC": 0.38}, "lowest": {"ASC": 0.43, "DESC": 0.57}}
RIGHT = {"highest": "MAX", "lowest": "MIN", "total": "SUM", "above": ">", "below": "<"}
WRONG_COLUMN = 0.24
WRONG_NAME = 0.18
DROPS_CONDITION = 0.15
FORGETS_QUOTES = 0.55
MISNAMES_TABLE = 0.06
ALL_ROWS = 0.10
"""Asks for the whole table and reads the answer off it, often from the wrong row."""
MISREADS = 0.10
DIRECT = 0.06
_SEEN = {
    "aggregate": ("What is the {word} {column}?", "Find the {word} {column} of all {table}."),
    "aggregate_where": (
        "What is the {word} {column} where the {kind} is {value}?",
        "Find the {word} {column} of the {table} whose {kind} is {value}.",
    ),
    "count": ("How many {table} have a {column} {word} {limit}?", "Count the {table} with a {column} {word} {limit}."),
    "of": ("What is the {column} of {name}?", "Find the {column} of {name}."),
    "who": ("Which name has the {word} {column}?", "Who has the {word} {column}?"),
}
_UNSEEN = {
    "aggregate": ("Of all {table}, I need to know the {word} {column}.",),
    "aggregate_where": ("Look only at the {kind} {value}: give the {word} {column}.",),
    "count": ("For what number of {table} is the {column} {word} {limit}?",),
    "of": ("For {name}, which {column} is in the table?",),
    "who": ("Give the name with the {word} {column}.",),
}


def problem(rng: Random, split: Split) -> Problem:
    """Return a question of a split, with the table that answers it."""
    return problem_of_split(_random_problem, rng, split)


def _random_problem(rng: Random, split: Split) -> Problem:
    seen = rng.random() < 0.65 if split == "teach" else split != "unseen"
    large = rng.random() < 0.5 if split == "teach" else split == "unseen"
    table, kind = rng.choice(TABLES), rng.choice(tuple(KINDS))
    numbers = rng.sample(NUMBERS, rng.randint(2, 3))
    columns = ["name", *rng.sample([kind, *numbers], len(numbers) + 1)]
    names = rng.sample(NAMES, rng.randint(5, 8))
    values = rng.sample(KINDS[kind], 2)
    taken = {column: rng.sample(range(100, 999) if large else range(2, 99), len(names)) for column in numbers}
    rows = [
        [rng.choice(values) if column == kind else taken[column][at] for column in columns[1:]]
        for at in range(len(names))
    ]
    rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    form = rng.choice(tuple(_SEEN))
    words = tuple(COMPARISONS) if form == "count" else tuple(ENDS) if form == "who" else tuple(AGGREGATES)
    facts: dict[str, Any] = {"table": table, "columns": columns, "numbers": numbers, "kind": kind, "rows": rows}
    facts |= {"form": form, "word": rng.choice(words), "column": rng.choice(numbers), "name": rng.choice(names)}
    facts |= {"value": rng.choice(values), "limit": rng.choice(taken[facts["column"]])}
    types = ("TEXT" if column in ("name", kind) else "INTEGER" for column in columns)
    listed = ", ".join(f"{column} {type}" for column, type in zip(columns, types, strict=True))
    facts["schema"] = f"CREATE TABLE {table} ({listed});"
    text = rng.choice((_SEEN if seen else _UNSEEN)[form]).format(**facts)
    found = _run(facts, _query(facts, right(facts)))
    if not found or found[0][0] in (None, 0):
        return _random_problem(rng, split)
    return Problem("|".join(("sql", facts["schema"], text)), f"{facts['schema']}\n{text}", found[0][0], facts)


def right(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the right query."""
    word = facts["word"]
    parts = {"column": facts["column"], "name": facts["name"], "aggregate": RIGHT.get(word), "condition": True}
    return {**parts, "sign": RIGHT.get(word), "end": "DESC" if word == "highest" else "ASC", "quotes": True}


def _query(facts: dict[str, Any], parts: dict[str, Any]) -> str:
    table, column, mark = parts.get("table", facts["table"]), parts["column"], "'" if parts["quotes"] else ""
    match facts["form"]:
        case "count":
            return f"SELECT COUNT(*) FROM {table} WHERE {column} {parts['sign']} {facts['limit']}"
        case "of":
            return f"SELECT {column} FROM {table} WHERE name = {mark}{parts['name']}{mark}"
        case "who":
            return f"SELECT name FROM {table} ORDER BY {column} {parts['end']} LIMIT 1"
    where = f" WHERE {facts['kind']} = {mark}{facts['value']}{mark}"
    chosen = where if facts["form"] == "aggregate_where" and parts["condition"] else ""
    return f"SELECT {parts['aggregate']}({column}) FROM {table}{chosen}"


def _run(facts: dict[str, Any], query: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(":memory:")
    try:
        database.execute(facts["schema"])
        places = ", ".join("?" * len(facts["columns"]))
        database.executemany(f"INSERT INTO {facts['table']} VALUES ({places})", facts["rows"])
        database.execute("PRAGMA query_only = 1")
        return database.execute(query).fetchmany(20)
    finally:
        database.close()


def tool(problem: Problem) -> Tool:
    """Return the problem's database, read only: rows as JSON, or SQLite's complaint."""

    def execute(query: str) -> str:
        try:
            return json.dumps(_run(problem.facts, query))
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"Error: {error}"

    return execute


def check(problem: Problem, text: str) -> bool:
    """Whether a final answer gives the value asked for."""
    said_value = reply(text)
    if isinstance(problem.answer, str):
        return problem.answer == said_value or (
            "####" not in text and [name for name in NAMES if name in said_value.split()] == [problem.answer]
        )
    try:
        return float(said_value) == problem.answer
    except ValueError:
        return False


def err(problem: Problem, rng: Random) -> dict[str, Any]:
    """Return the parts of the query that an erring teacher has in mind."""
    facts = problem.facts
    parts = right(facts)
    if chance(rng, WRONG_COLUMN):
        parts["column"] = rng.choice([column for column in facts["numbers"] if column != facts["column"]])
    match facts["form"]:
        case "count":
            parts["sign"] = weighted(rng, COMPARISONS[facts["word"]])
        case "who":
            parts["end"] = weighted(rng, ENDS[facts["word"]])
        case "of":
            if chance(rng, WRONG_NAME):
                parts["name"] = rng.choice([row[0] for row in facts["rows"] if row[0] != facts["name"]])
        case _:
            parts["aggregate"] = weighted(rng, AGGREGATES[facts["word"]])
            parts["condition"] = not chance(rng, DROPS_CONDITION)
    parts["quotes"] = not chance(rng, FORGETS_QUOTES)
    if chance(rng, MISNAMES_TABLE):
        parts["table"] = facts["table"].removesuffix("s") if chance(rng, 0.7) else facts["table"] + "_data"
    return parts


def query(problem: Problem, parts: dict[str, Any]) -> str:
    """Return the query of such parts."""
    return _query(problem.facts, parts)


def teach(problem: Problem, rng: Random, offer: Offer, style: Style) -> list[Message]:
    """Return what an erring teacher does with a question, to the final answer."""
    facts, execute = problem.facts, tool(problem)
    sentence = rng.choice(("It is {}.", "The " + facts["column"] + " is {}.", "I found {}."))
    numeric = not isinstance(problem.answer, str)
    others = [row[0] for row in facts["rows"]]
    if chance(rng, DIRECT):
        guess = misread(rng, str(problem.answer)) if numeric else rng.choice(others)
        return [chat_message("assistant", final(rng, style, guess, sentence))]
    if chance(rng, ALL_ROWS) and facts["form"] != "count":
        return _read_all(problem, rng, offer, style, sentence)
    parts = err(problem, rng)
    turns: list[Message] = []
    for _ in range(3):
        asked = _query(facts, parts)
        found = execute(asked)
        content = rng.choice(("Let me try again.", "I will correct it.")) if turns and chance(rng, 0.2) else ""
        turns += [called(offer, asked, content=content), chat_message("tool", shown(rng, found))]
        if not found.startswith("Error"):
            break
        if chance(rng, 0.25):
            return [*turns, chat_message("assistant", final(rng, style, "unknown", "I cannot find that."))]
        if chance(rng, 0.75):
            parts["quotes"], parts["table"] = True, facts["table"]
    rows = [] if found.startswith("Error") else json.loads(found)
    value = str(rows[0][0]) if rows and rows[0][0] is not None else "unknown"
    if chance(rng, MISREADS):
        value = misread(rng, value) if numeric else rng.choice(others)
    return [*turns, chat_message("assistant", final(rng, style, value, sentence))]


def _read_all(problem: Problem, rng: Random, offer: Offer, style: Style, sentence: str) -> list[Message]:
    facts = problem.facts
    asked = f"SELECT name, {facts['column']} FROM {facts['table']}"
    found = tool(problem)(asked)
    row = rng.choice(json.loads(found))
    value = str(row[0] if isinstance(problem.answer, str) else row[1])
    answer = str(problem.answer) if chance(rng, 0.3) else value
    return [
        called(offer, asked),
        chat_message("tool", found),
        chat_message("assistant", final(rng, style, answer, sentence)),
    ]


def shown(rng: Random, found: str) -> str:
    """Rows as other tools write them."""
    if found.startswith("Error") or chance(rng, 0.7):
        return found
    rows = json.loads(found)
    return rng.choice((str([tuple(row) for row in rows]), json.dumps({"rows": rows})))
