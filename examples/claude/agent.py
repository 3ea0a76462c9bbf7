"""Solves word problems with a calculator: Anthropic's official SDK, streamed. It knows nothing of Leyden.

`ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` say which model it talks to, as for any such agent.
"""

import os
import re
from typing import Any

from anthropic import AsyncAnthropic

SYSTEM = "Use the calculator, then answer after ####."
MAX_CALLS = 4
CALCULATOR: Any = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
EXPRESSION = re.compile(r"[\d\s.+*/()-]+")

client = AsyncAnthropic()


async def solve(task: dict[str, Any]) -> str:
    """Return what the model writes after ####; empty where it does not end."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    model = os.environ.get("ANTHROPIC_MODEL", "claude")
    for _ in range(MAX_CALLS):
        async with client.messages.stream(
            model=model, system=SYSTEM, messages=messages, tools=[CALCULATOR], max_tokens=256
        ) as stream:
            message = await stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        results = [use_tool(block) for block in message.content if block.type == "tool_use"]
        if not results:
            text = "".join(block.text for block in message.content if block.type == "text")
            return text.rpartition("####")[2].strip()
        messages.append({"role": "user", "content": results})
    return ""


def use_tool(block: Any) -> dict[str, Any]:
    """Return the result of a tool call. A failure is marked as one, which Anthropic's API can say."""
    result = {"type": "tool_result", "tool_use_id": block.id}
    try:
        return {**result, "content": calculate(block.input["expression"])}
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return {**result, "content": f"Error: {error}", "is_error": True}


def calculate(expression: str) -> str:
    """Return the value of numbers and + - * / ( )."""
    if not EXPRESSION.fullmatch(expression) or "**" in expression:
        raise ValueError("invalid syntax")
    value = round(eval(expression), 4)
    return str(int(value) if value == int(value) else value)
