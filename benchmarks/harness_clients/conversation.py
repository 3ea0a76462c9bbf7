"""What every script here talks about, and how it reports: two questions with a tool, the answers as the last line."""

import argparse
import json
import os

parser = argparse.ArgumentParser()
parser.add_argument("dialect", choices=["chat", "messages", "responses", "stored", "completions", "google"])
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()

timeout_s = float(os.environ.get("HARNESS_TIMEOUT_S", "600"))
system = "You can add."
questions = ["What is 2 + 3, and 4 + 5?", "And 10 + 20?"]
NUMBER = {"type": "number"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def finish(answers: list) -> None:
    """Print the answers."""
    print(json.dumps(answers, ensure_ascii=False, separators=(",", ":")))
