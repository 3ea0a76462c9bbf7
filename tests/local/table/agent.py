"""A task of two steps: ask a table by SQL, then say what came of it. No third call makes up for the first."""

import json
import sqlite3
from typing import Any

from openai import OpenAI

SYSTEM = "Query the database, then answer after ####."
EXECUTE = {
    "type": "function",
    "function": {
        "name": "execute",
        "description": "Run a SQL query and return the rows.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The query."}},
            "required": ["query"],
        },
    },
}

client = OpenAI()


def solve(task: dict[str, Any]) -> str | None:
    """What stands after #### in the model's second message; None where it made no query or no answer."""
    question = f"{task['schema']}\n{task['question']}"
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    asked = client.chat.completions.create(model="spark", messages=messages, tools=[EXECUTE], max_tokens=64)
    messages.append(asked.choices[0].message)
    for call in asked.choices[0].message.tool_calls or ():
        found = execute(task, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    if messages[-1] is asked.choices[0].message:
        return None
    said = client.chat.completions.create(model="spark", messages=messages, tools=[EXECUTE], max_tokens=64)
    return (said.choices[0].message.content or "").rpartition("####")[2].strip()


def reward(task: dict[str, Any], result: str | None) -> float:
    """1 for the right number, 0 for anything else."""
    return float(result == str(task["answer"]))


def execute(task: dict[str, Any], arguments: str) -> str:
    """The tool: rows as JSON, or SQLite's complaint."""
    database = sqlite3.connect(":memory:")
    try:
        database.execute(task["schema"])
        table, places = task["schema"].split()[2], ", ".join("?" * len(task["rows"][0]))
        database.executemany(f"INSERT INTO {table} VALUES ({places})", task["rows"])
        database.execute("PRAGMA query_only = 1")
        return json.dumps(database.execute(json.loads(arguments)["query"]).fetchmany(20))
    except (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, KeyError) as error:
        return f"Error: {error}"
    finally:
        database.close()
