"""The agent of `agent.py` with a short prompt, for the bundled model of two million parameters."""

from typing import Any

import agent
from calculator import calculate

SYSTEM = "Use the calculator, then answer after ####."


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


async def solve(task: dict[str, Any]) -> str:
    """Return the answer to a question. What the model was taught to write may have several operations."""
    return await agent.solve(task, SYSTEM, calculator)
