"""The agent of the loop's benchmark: one question, one answer, scored by chance so that no group is ever flat."""

import random
from typing import Any

from openai import OpenAI

client = OpenAI()


def answer(task: dict[str, Any]) -> str:
    """Ask the model once; how long it answers is the run's to say."""
    reply = client.chat.completions.create(model="spark", messages=task["messages"])
    return reply.choices[0].message.content or ""


def reward(result: str) -> float:
    """Any number: both sides then train on every completion."""
    return random.random()
