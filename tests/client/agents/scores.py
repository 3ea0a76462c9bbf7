"""Reward functions that live apart from any agent."""

from typing import Any


def all_right(task: dict[str, int], result: dict[str, Any]) -> float:
    return float(result["said"] == [task["n"]] * 4)


def all_said(task: dict[str, int], result: list[int]) -> float:
    return float(result == [task["n"]] * 5)
