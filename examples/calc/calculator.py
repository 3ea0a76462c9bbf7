"""The calculator: numbers, + - * / ( ) and powers with small exponents. It evaluates no names and calls nothing."""

import ast
import math
import operator
import re
from typing import Any

LIMIT = 1e15
"""Larger values, and exponents above 64, are refused: a model may ask for 9**9**9."""
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Evaluate an expression. Raises ValueError if it is not arithmetic or too large.

    A name before it (`total = 12 * 34`), `$` and commas in numbers (1,234) are left out.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)|\$|^\s*[A-Za-z_]\w*\s*=", "", expression).translate(SIGNS)
    try:
        value = _evaluate(ast.parse(plain.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("invalid syntax") from error
    except ArithmeticError as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression is too long") from error
    return str(round(value)) if float(value).is_integer() else str(round(value, 6))


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            operands = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow) and abs(operands[1]) > 64:
                raise ValueError("the exponent is too large")
            value = OPERATIONS[type(op)](*operands)
        case ast.UnaryOp(op, operand) if type(op) in OPERATIONS:
            value = OPERATIONS[type(op)](_evaluate(operand))
        case _:
            raise ValueError("only numbers and + - * / ** ( ) can be evaluated")
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > LIMIT:
        raise ValueError("the value is too large")
    return value
