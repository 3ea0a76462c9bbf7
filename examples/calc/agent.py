"""Solves word problems with a calculator: an AutoGen assistant. It knows nothing of Leyden.

The assistant decides itself when to call the calculator, up to `MAX_CALLS` times. `OPENAI_BASE_URL` and
`OPENAI_API_KEY` say which model it talks to, as for any such agent.
"""

import os
import re
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calculator import calculate

SYSTEM = (
    "Solve the problem step by step. Call the calculator for every calculation. When you know the result, end with "
    "#### and the number."
)
SYSTEM_ALONE = "Solve the problem step by step. When you know the result, end with #### and the number."
MAX_CALLS = 3
MAX_TOKENS = 256
ANY_MODEL = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
"""AutoGen knows the names of OpenAI's models; others are described."""

model = OpenAIChatCompletionClient(
    model=os.environ.get("OPENAI_MODEL", "calc"),
    model_info=ANY_MODEL,
    max_tokens=MAX_TOKENS,
    temperature=float(os.environ.get("OPENAI_TEMPERATURE", 1)),
)


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


async def solve(task: dict[str, Any], system: str = SYSTEM) -> str:
    """Return the answer to a question. AutoGen's agents keep their conversation, so each question has a new one."""
    assistant = AssistantAgent(
        "solver", model, tools=[calculator], system_message=system, max_tool_iterations=MAX_CALLS
    )
    return await ask(assistant, task)


async def solve_alone(task: dict[str, Any]) -> str:
    """Return the answer to a question, without the calculator: what it is worth to the model."""
    return await ask(AssistantAgent("solver", model, system_message=SYSTEM_ALONE), task)


async def ask(assistant: AssistantAgent, task: dict[str, Any]) -> str:
    """Return an assistant's answer to a question."""
    result = await assistant.run(task=task["question"])
    return parse_answer(result.messages[-1].to_text())


def parse_answer(text: str) -> str:
    """Return what follows the last ####; without one, the last number of the text."""
    _, mark, answer = text.rpartition("####")
    numbers = re.findall(r"-?[\d,]*\.?\d+", text)
    return answer.strip() if mark or not numbers else numbers[-1]
