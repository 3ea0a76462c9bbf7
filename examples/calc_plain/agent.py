"""An agent with nothing but the `openai` client and a calculator. It knows nothing of Leyden.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model it talks to, as for any such agent.
"""

import ast
import json
import operator
from collections.abc import Sequence
from typing import Any

from openai import OpenAI

SYSTEM = "Use the calculator, then answer after ####."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression to evaluate."}},
            "required": ["expression"],
        },
    },
}
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}

client = OpenAI()


def solve(task: dict[str, Any]) -> str | None:
    """Answer a question in words: what stands after #### in the model's last message."""
    return converse(task["question"])


def solve_greedily(task: dict[str, Any]) -> str | None:
    """Answer a question at temperature 0."""
    return converse(task["question"], temperature=0)


def converse(question: str, examples: Sequence[dict[str, Any]] = (), **sampling: float) -> str | None:
    """Let the model use the calculator until it answers. `examples` are messages that stand before the question."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *examples, {"role": "user", "content": question}]
    for _ in range(4):
        reply = client.chat.completions.create(
            model="spark", messages=messages, tools=[CALCULATOR], max_tokens=80, **sampling
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return (message.content or "").rpartition("####")[2].strip()
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    return None


def reward(task: dict[str, Any], result: str | None) -> float:
    """1 for the right number, 0 for anything else."""
    return float(result == str(task["answer"]))


def calculate(arguments: str) -> str:
    """Return the tool."""
    try:
        value = evaluate(ast.parse(json.loads(arguments)["expression"], mode="eval").body)
    except (SyntaxError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


def evaluate(node: ast.expr) -> Any:
    """Numbers and the four operations, and nothing else."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) < 1e12:
            return value
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](evaluate(left), evaluate(right))
        case ast.UnaryOp(op, operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](evaluate(operand))
    raise ValueError("only numbers and + - * / can be evaluated")
