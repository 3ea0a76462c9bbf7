"""Conversations of the kinds that spark will meet, made from seeds: what its tokenizer is fitted to.

The same seed gives the same conversations for ever: the tokenizer in the package is made from them, byte for byte.
Here is only what shapes a vocabulary (words, numbers, JSON, SQL); whether an answer is a good one matters elsewhere.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

Message = dict[str, Any]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer in one short sentence.",
    "You solve problems step by step. Use the calculator for every calculation.",
    "You answer questions about a database. Use the tools, then give the final answer.",
    "You look things up before you answer. If nothing is found, say that you do not know.",
    "Use the tools when they help. Put the final answer after ####.",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "James", "Karen", "Leo", "Maria")
THINGS = (
    *("apples", "books", "boxes", "cards", "coins", "cookies", "dollars", "eggs", "flowers", "hours", "letters"),
    *("marbles", "miles", "minutes", "oranges", "pages", "pencils", "people", "stamps", "stickers", "tickets", "trees"),
)
TOPICS = (
    *("water", "music", "history", "the weather", "a good book", "cooking", "the sun", "the moon", "travel", "the sea"),
    *("sport", "school", "work", "friends", "computers", "programming", "language", "animals", "time", "light", "food"),
)
PROSE = (
    "Water is a clear liquid that has no taste. Rain falls from clouds, runs into rivers and returns to the sea.",
    "The sun gives light and heat. Plants use its light to grow, and people and animals eat the plants.",
    "A computer follows instructions one after another. A program is a list of such instructions, written by a person.",
    "To make bread, mix flour, water, salt and yeast, wait until it has grown, and bake it for about forty minutes.",
    "Music is sound that is ordered in time. Some people like it loud and fast; others would rather have it quiet.",
    "History tells us what happened before, who did it, and why it still matters to the world we live in today.",
    "If you want to learn a language, read a little every day, listen to others, and do not be afraid to try.",
    "Thank you for your question. I think that the best way to start is with something small that you know well.",
    "I am sorry, but I cannot help with that. Could you tell me more about what you would like to do?",
    "First, find out what is given. Then write down what is asked. Finally, check that the result makes sense.",
    "Yes, that is right. No, this is not correct, because the number of days in a year is 365, not 356.",
    "There are seven days in a week, twelve months in a year, sixty minutes in an hour and 100 cents in a dollar.",
    "A good answer is short, true and easy to understand. When you are not sure about it, it is better to say so.",
    "The city lies on a river between two mountains. Its old town, the market and the university are known far away.",
    "Between the first and the second world war, many countries changed their government, their money and their laws.",
    "She was born in the north of the country, studied physics, and later became the first woman to win the prize.",
)
WORDS = tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())
"""Common English words."""
ASK = (
    "Tell me about {}.",
    "What is {}?",
    "Can you explain {} to me in simple words?",
    "Why do people like {}?",
    "Write two sentences about {}.",
    "Hello! How are you? I would like to talk about {}.",
    "Please help me with {}, thanks.",
    "How does {} work?",
    "When should I think about {}, and where can I find out more?",
)


class Conversation(NamedTuple):
    """Messages, and the tools offered with them."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def tool(name: str, description: str, required: bool = True, **parameters: tuple[str, str]) -> dict[str, Any]:
    """A tool as the OpenAI API describes it; a parameter is a type and a description."""
    properties = {key: {"type": kind, "description": about} for key, (kind, about) in parameters.items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(properties)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "arithmetic": (
        tool("calculator", "Evaluate an arithmetic expression.", expression=("string", "The expression to evaluate.")),
        tool("calculate", "Do one calculation.", a=("number", "First number."), b=("number", "Second number.")),
        tool("add", "Add two integers.", a=("integer", "a"), b=("integer", "b")),
        tool("multiply", "Multiply two integers.", a=("integer", "a"), b=("integer", "b")),
    ),
    "sql": (
        tool("execute", "Run a SQL query and return the rows.", query=("string", "The SQL query.")),
        tool("execute_sql", "Execute a query on the database.", sql=("string", "A SELECT statement.")),
        tool("list_tables", "List the tables of the database.", required=False),
        tool("get_schema", "Get the columns of a table.", table_name=("string", "The name of the table.")),
    ),
    "lookup": (
        tool("search", "Search the documents.", query=("string", "What to search for.")),
        tool("lookup", "Look up a key.", key=("string", "The key."), limit=("integer", "Maximum number of results.")),
        tool("get_weather", "Get the current weather in a city.", city=("string", "The city, for example Paris.")),
        tool("read_page", "Read a page by its title.", title=("string", "The title."), full=("boolean", "All of it.")),
    ),
}
COLUMNS = {
    "users": ("id", "name", "age", "city", "email", "created_at"),
    "orders": ("id", "user_id", "product_id", "quantity", "price", "date"),
    "products": ("id", "name", "category", "price", "stock"),
    "students": ("student_id", "name", "grade", "score", "class_id"),
    "singer": ("singer_id", "name", "country", "song_name", "age"),
    "countries": ("code", "name", "population", "capital", "area"),
}


def chat_message(role: str, content: str) -> Message:
    """Return a message of text."""
    return {"role": role, "content": content}


def called(name: str, content: str = "", **arguments: Any) -> Message:
    """Return an assistant's tool call."""
    return {**chat_message("assistant", content), "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def words(rng: Random) -> str:
    """A sentence in form alone: common words in any order, so that no phrase of ours shapes the vocabulary."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(6, 16))).capitalize() + rng.choice(".?!")


def prose(rng: Random) -> str:
    """Return what stands in a document, or in an answer."""
    return " ".join((rng.choice(PROSE), *(words(rng) for _ in range(rng.randint(1, 4)))))


def chat(rng: Random) -> Conversation:
    """Questions and answers without tools."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        messages.append(chat_message("user", rng.choice((rng.choice(ASK).format(rng.choice(TOPICS)), words(rng)))))
        messages.append(chat_message("assistant", prose(rng)))
    return Conversation(messages, [])


def arithmetic(rng: Random) -> Conversation:
    """Return a word problem, worked out with a calculator."""
    who, other, thing = rng.choice(NAMES), rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(2, 99), rng.randint(2, 999), rng.randint(2, 20)
    question, expression, value = rng.choice(
        (
            (f"{who} has {a} {thing} and buys {b} more. How many {thing} does {who} have?", f"{a} + {b}", a + b),
            (f"{who} has {b} {thing} and gives {a} to {other}. How many are left?", f"{b} - {a}", b - a),
            (f"There are {c} boxes with {a} {thing} each. How many {thing} are there in total?", f"{c} * {a}", c * a),
            (f"{who} shares {a * c} {thing} equally among {c} friends. How many does each get?", f"{a * c} / {c}", a),
            (f"What is ({a} + {b}) * {c}?", f"({a} + {b}) * {c}", (a + b) * c),
            (f"If one ticket costs ${a}.50, how much do {c} tickets cost?", f"{a}.50 * {c}", a * c + c / 2),
        )
    )
    if rng.random() < 0.15:
        expression += " +"
        turns = [called("calculator", expression=expression), chat_message("tool", "Error: invalid syntax")]
        turns.append(called("calculator", "Let me try again.", expression=expression[:-2]))
    else:
        turns = [called("calculator", rng.choice(("", f"I need to calculate {expression}.")), expression=expression)]
    turns.append(chat_message("tool", str(value)))
    answer = rng.choice((f"The answer is {value}.", f"#### {value}", f"{who} has {value} {thing}. #### {value}"))
    return Conversation(
        [chat_message("user", question), *turns, chat_message("assistant", answer)], list(TOOLS["arithmetic"])
    )


def sql(rng: Random) -> Conversation:
    """Return a question about a table, with a query that may fail first."""
    table = rng.choice(tuple(COLUMNS))
    columns = COLUMNS[table]
    column, key, number = rng.choice(columns[1:]), rng.choice(columns), rng.randint(1, 500)
    query, question = rng.choice(
        (
            (f"SELECT COUNT(*) FROM {table}", f"How many {table} are there?"),
            (f"SELECT {column} FROM {table} WHERE {key} = {number}", f"What is the {column} where {key} is {number}?"),
            (f"SELECT MAX({column}), MIN({column}) FROM {table}", f"What are the highest and lowest {column}?"),
            (
                f"SELECT {key}, AVG({column}) AS average FROM {table} GROUP BY {key} HAVING COUNT(*) > {number}",
                f"Show the average {column} for each {key} with more than {number} {table}.",
            ),
            (
                f"SELECT DISTINCT {column} FROM {table} ORDER BY {column} DESC LIMIT {number}",
                f"List the {number} different values of {column} in descending order.",
            ),
            (
                f"SELECT T1.{column} FROM {table} AS T1 JOIN orders AS T2 ON T1.id = T2.user_id "
                f"WHERE T2.price >= {number} AND T1.{key} LIKE '%a%' OR T1.{key} IS NOT NULL",
                f"Which {column} belong to orders with a price of at least {number}?",
            ),
        )
    )
    kinds = ("INTEGER", "TEXT", "REAL")
    created = f"CREATE TABLE {table} ({', '.join(f'{name} {rng.choice(kinds)}' for name in columns)});"
    turns = []
    if rng.random() < 0.35:
        problem = rng.choice(
            (f"no such column: {column}s", f"no such table: {table}s", f'near "{table}": syntax error')
        )
        turns = [called("execute", query=query.replace(table, f"{table}s")), chat_message("tool", f"Error: {problem}")]
    rows = [[rng.choice(NAMES) if rng.random() < 0.5 else rng.randint(0, 999)] for _ in range(rng.randint(0, 4))]
    turns += [called("execute", query=query), chat_message("tool", json.dumps(rng.choice((rows, {"rows": rows}))))]
    found = ", ".join(str(row[0]) for row in rows) or "There are no rows."
    return Conversation(
        [chat_message("user", f"{created}\n{question}"), *turns, chat_message("assistant", found)], list(TOOLS["sql"])
    )


def lookup(rng: Random) -> Conversation:
    """Return a question that documents answer, or do not."""
    name, topic = rng.choice(NAMES), rng.choice(TOPICS)
    question = rng.choice(
        ("Where was {} born?", "Which book did {} write?", "In which year did {} win the prize?", "Who is {}?")
    ).format(name)
    page = {"results": [{"title": name, "text": prose(rng)}]}
    found = rng.choice((prose(rng), json.dumps(page), "No results found."))
    calls = called("search", rng.choice(("", "I will search for it.")), query=f"{name} {topic}")
    results = [chat_message("tool", found)]
    if rng.random() < 0.3:
        calls["tool_calls"] += called("get_weather", city=rng.choice(("Paris", "London", "Berlin", "Tokyo")))[
            "tool_calls"
        ]
        results.append(
            chat_message("tool", json.dumps({"temperature": rng.randint(-9, 35), "unit": "celsius", "sky": "clear"}))
        )
    answer = prose(rng) if found != "No results found." else "I do not know."
    return Conversation(
        [chat_message("user", question), calls, *results, chat_message("assistant", answer)], list(TOOLS["lookup"])
    )


KINDS: tuple[Callable[[Random], Conversation], ...] = (chat, arithmetic, sql, lookup)


def conversations(seed: int = 0, number: int = 2000) -> Iterator[Conversation]:
    """Conversations of every kind in turn; one in two has a system message, and tools come in any order and number."""
    rng = Random(seed)
    for index in range(number):
        messages, tools = KINDS[index % len(KINDS)](rng)
        if rng.random() < 0.5:
            messages = [chat_message("system", rng.choice(SYSTEMS)), *messages]
        yield Conversation(messages, rng.sample(tools, rng.randint(1, len(tools))) if tools else [])
