"""An agent with a long horizon and a sparse reward: it fills in a ledger, one entry after the other.

Each entry is a question of `examples/calc_plain`, asked in a conversation of its own. The agent earns 1 when all
entries are right and 0 otherwise. Its tool knows the gold answers: it fails on every result that is not the entry's,
which is what an automatic reward can see. So automatic rewards tell which entries are right, as `partial` does for the
rollout as a whole.
"""

import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from calc_plain.agent import CALCULATOR, SYSTEM, calculate
from openai import OpenAI

from leyden.episodes import Episode
from leyden.records import Purpose

TRIES = 3
"""Model calls for an entry: the last one answers."""

client = OpenAI()


def solve(task: dict[str, Any]) -> list[str | None]:
    """Return the result of each entry."""
    return [fill_in(entry["question"], str(entry["answer"])) for entry in task["entries"]]


def solve_unchecked(task: dict[str, Any]) -> list[str | None]:
    """Return the result of each entry, with a tool that accepts every result."""
    return [fill_in(entry["question"], None) for entry in task["entries"]]


def fill_in(question: str, balance: str | None) -> str | None:
    """Return what stands after #### in the model's last message."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(TRIES):
        reply = client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "spark"), messages=messages, tools=[CALCULATOR], max_tokens=80
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return (message.content or "").rpartition("####")[2].strip()
        messages.append(message)
        for call in message.tool_calls:
            value = calculate(call.function.arguments)
            content = value if balance in (value, None) else f"Error: {value} does not balance"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return None


def reward(task: dict[str, Any], result: list[str | None]) -> float:
    """1 when every entry is right."""
    return float(result == [str(entry["answer"]) for entry in task["entries"]])


def partial(task: dict[str, Any], result: list[str | None], episode: Episode) -> float:
    """Partial credit, the share of entries that are right, in training; held-out ledgers are scored by `reward`."""
    if episode.rollout.purpose != Purpose.TRAIN:
        return reward(task, result)
    return fmean(filled == str(entry["answer"]) for filled, entry in zip(result, task["entries"], strict=True))
