"""The reward: 1 for the right number, 0 for anything else."""

import re
from typing import Any

NUMBER = re.compile(r"[^\d.+-]*(-?\d[\d,]*(?:\.\d+)?|-?\.\d+)[^\d]*")
"""One number, with a currency, a unit or a full stop around it."""


def reward(task: dict[str, Any], result: str) -> float:
    """Whether the answer is the task's number. An answer with two numbers is wrong."""
    said = parse_number(result)
    return float(said is not None and abs(said - float(task["answer"])) <= 1e-4)


def parse_number(text: str) -> float | None:
    """Return the number of an answer such as `42`, `$1,200.50` or `18 eggs.`; None for none, or more than one."""
    found = NUMBER.fullmatch(text.strip())
    return None if found is None else float(found[1].replace(",", ""))
