"""The SQL agent of examples/sql on the bundled model, whose roles request models by their own names.

So each can be answered by a policy of its own; the spans that name its roles arrive after a call is routed.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sql"))

import agent


class NamedRoles(agent.Roles):
    """The roles of the agent, each with a model name."""

    async def _ask(self, role: str, state: agent.State) -> str:
        reply = await agent.model.ainvoke(self._prompts[role].format_messages(**state), model=role)
        return str(reply.content)


agent.Roles = NamedRoles

from spark_agent import graph  # noqa: E402  (it is built from the roles)


async def solve(task: dict[str, Any]) -> str:
    """Return the query that the agent settles on."""
    return await agent.answer(graph, task, sample_rows=0)
