"""The agent of `agent.py` with a short prompt, for the bundled model of two million parameters."""

from typing import Any

import agent

SYSTEM = "Use the calculator, then answer after ####."


async def solve(task: dict[str, Any]) -> str:
    """Return the answer to a question."""
    return await agent.solve(task, SYSTEM)
