"""The agent of `agent.py` with the calculator of an MCP server (`mcp-server-calculator`). It knows nothing of Leyden.

A server is a process that takes a second to start, so an instance of `Solver` keeps one for all of its questions.
"""

import sys
from typing import Any

from agent import MAX_CALLS, SYSTEM, model, parse_answer
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

SERVER = StdioServerParams(command=sys.executable, args=["-m", "mcp_server_calculator"], read_timeout_seconds=60)


class Solver:
    """Answers one question at a time."""

    def __init__(self) -> None:
        self._workbench = McpWorkbench(SERVER)
        self._started = False

    async def __call__(self, task: dict[str, Any]) -> str:
        """Return the assistant's answer to a question."""
        if not self._started:
            await self._workbench.start()
            self._started = True
        assistant = AssistantAgent(
            "solver", model, workbench=self._workbench, system_message=SYSTEM, max_tool_iterations=MAX_CALLS
        )
        result = await assistant.run(task=task["question"])
        return parse_answer(result.messages[-1].to_text())

    async def aclose(self) -> None:
        """Stop the server."""
        if self._started:
            await self._workbench.stop()
