"""Solves word problems with a calculator: httpx and a while loop, no SDK and no framework. It knows nothing of Leyden.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model it talks to, as for any such agent.
"""

import json
import os
import re
from typing import Any

import httpx

SYSTEM = "Use the calculator, then answer after ####."
MAX_CALLS = 4
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
EXPRESSION = re.compile(r"[\d\s.+*/()-]+")


async def solve(task: dict[str, Any]) -> str:
    """Return what the model writes after ####; empty where it does not end."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body: dict[str, Any] = {"model": os.environ.get("OPENAI_MODEL", "scratch"), "tools": [CALCULATOR]}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    calls = 0
    async with httpx.AsyncClient(timeout=600) as client:
        while calls < MAX_CALLS:
            calls += 1
            reply = await client.post(url, headers=headers, json={**body, "messages": messages, "max_tokens": 256})
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"] or "").rpartition("####")[2].strip()
            for call in message["tool_calls"]:
                result = calculate(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""


def calculate(arguments: str) -> str:
    """Return the tool: the value of numbers and + - * / ( ), or what is wrong with them."""
    try:
        expression = json.loads(arguments)["expression"]
        if not EXPRESSION.fullmatch(expression) or "**" in expression:
            return "Error: invalid syntax"
        value = round(eval(expression), 4)
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"Error: {error}"
    return str(int(value) if value == int(value) else value)
