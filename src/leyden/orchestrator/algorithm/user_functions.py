"""Checks what a user's functions of rewards and credit return."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from leyden.learner.user_functions import FunctionKind
from leyden.rl.advantage import CallBatch
from leyden.rl.credit import RolloutRewards


def _check_credit(values: Any, rewards: RolloutRewards, _: Any) -> str | None:
    if (problem := _check_length(values, len(rewards.steps), "calls")) is not None:
        return problem
    bad = [f"{value!r} for call {n}" for n, value in enumerate(values) if value is not None and not _is_number(value)]
    return f"{bad[0]} of a rollout: return a finite number, or None" if bad else None


def _check_advantage(values: Any, calls: CallBatch, _: Any) -> str | None:
    return _check_length(values, len(calls.value), "calls") or _check_numbers(values, "call")


def _check_aggregation(values: Any, lengths: Sequence[Sequence[int]], _: Any) -> str | None:
    if (problem := _check_length(values, len(lengths), "rollouts")) is not None:
        return problem
    for weights, calls in zip(values, lengths, strict=True):
        problem = _check_length(weights, len(calls), "calls of a rollout") or _check_numbers(weights, "call")
        if problem is not None:
            return problem
    return None


def _check_state(key: Any, *_: Any) -> str | None:
    try:
        hash(key)
    except TypeError:
        return f"a {type(key).__name__}, which cannot be hashed: return a string, a number, or a tuple of such"
    return None


def _check_branch(found: Any, *_: Any) -> str | None:
    return None if isinstance(found, bool) else f"{found!r}: return True to continue the rollout from there, or False"


def _check_rule(weight: Any, signal: Any) -> str | None:
    if weight is None or _is_number(weight):
        return None
    return f"{weight!r} for {signal.name}: return a finite number, or None"


def _check_length(values: Any, count: int, of: str) -> str | None:
    if not hasattr(values, "__len__") or isinstance(values, (str, dict, set)):
        return f"a {type(values).__name__} for {count} {of}: return one value for each"
    return f"{len(values)} values for {count} {of}: return one for each" if len(values) != count else None


def _check_numbers(values: Any, of: str) -> str | None:
    bad = [f"{value!r} for {of} {n}: return finite numbers" for n, value in enumerate(values) if not _is_number(value)]
    return bad[0] if bad else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)


CREDIT_FUNCTIONS = {
    "algorithm.credit": FunctionKind(("rewards", "hyperparameters"), _check_credit),
    "algorithm.advantage": FunctionKind(("calls", "hyperparameters"), _check_advantage),
    "algorithm.aggregation": FunctionKind(("lengths", "hyperparameters"), _check_aggregation),
    "algorithm.state": FunctionKind(("episode", "call"), _check_state),
    "algorithm.branch": FunctionKind(("point", "hyperparameters"), _check_branch),
    "signals.rule": FunctionKind(("signal",), _check_rule),
}
