"""The agent of agent.py for a model that was not taught tools: worked examples stand before the question."""

import json
from typing import Any

from agent import calculate, converse

WORKED = (
    ("Ana has 12 pens and buys 30 more. How many pens does Ana have?", "12 + 30"),
    ("A box has 8 rows of 7 eggs. How many eggs are in the box?", "8 * 7"),
    ("Kim had 95 cards and lost 21. How many cards are left?", "95 - 21"),
    ("Tom gave away 15 books and has 26 left. How many books did Tom have before?", "26 + 15"),
    ("There are 9 bags with 6 balls each and 4 bags with 3 balls each. How many balls are there?", "9 * 6 + 4 * 3"),
    ("Of 60 shirts, 22 are blue. How many shirts are not blue?", "60 - 22"),
    ("Lea has 41 coins, finds 17 and spends 33. How many coins are left?", "41 + 17 - 33"),
    ("A train goes 50 miles an hour. How many miles does it go in 4 hours?", "50 * 4"),
)


def solve(task: dict[str, Any]) -> str | None:
    """Answer a question in words."""
    return converse(task["question"], EXAMPLES)


def worked_example(number: int, question: str, expression: str) -> list[dict[str, Any]]:
    """Return a conversation in which the model calls the calculator once and answers with its result."""
    arguments = json.dumps({"expression": expression})
    call = {"id": f"example_{number}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    result = calculate(arguments)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]


EXAMPLES = [message for number, worked in enumerate(WORKED) for message in worked_example(number, *worked)]
