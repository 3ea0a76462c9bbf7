"""Loads a user's function that replaces a built-in one, and checks its signature and everything that it returns.

An error names the configuration key and says in one line what the function should return.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from msgspec import Struct
from torch import Tensor

from leyden.config import ConfigError
from leyden.learner.errors import TrainingError
from leyden.rl.advantage import CallBatch
from leyden.rl.credit import RolloutRewards
from leyden.rl.loss import TokenBatch
from leyden.user_code.loading import LoadError, load_function, one_line, placeholder_keys


class FunctionKind(Struct, frozen=True):
    """How functions under one configuration key are called and checked."""

    parameters: tuple[str, ...]
    """Names of the positional arguments."""
    check: Callable[..., str | None]
    """Takes the returned value and the arguments; returns what is wrong with the value, None if nothing is."""


def load_user_function(key: str, reference: str, base: str) -> Callable[..., Any]:
    """Load the function that a configuration names under `key`; the result checks every call of it."""
    kind = FUNCTION_KINDS[key]
    try:
        with placeholder_keys():
            function = load_function(reference, base)
    except LoadError as error:
        raise ConfigError(f"`{key}`: {error}") from error
    try:
        inspect.signature(function).bind(*kind.parameters)
    except TypeError as error:
        raise ConfigError(f"`{key}`: {reference!r} is called with ({', '.join(kind.parameters)}): {error}") from error
    except ValueError:  # a function written in C has no signature
        pass

    @wraps(function)
    def checked(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except Exception as error:
            raise TrainingError(f"`{key}` failed: {one_line(error)}") from error
        if (problem := kind.check(value, *arguments)) is not None:
            raise TrainingError(f"`{key}` returned {problem}")
        return value

    return checked


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


def _check_loss(value: Any, tokens: TokenBatch, _: Any) -> str | None:
    match value:
        case (Tensor() as losses, dict() as metrics):
            pass
        case _:
            return f"a {type(value).__name__}: return a tensor with the loss of each token, and a dict of metrics"
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape != tokens.current.shape:
            return f"{_describe(metric)} for the metric {name!r}: return one number for each token"
    if losses.shape == tokens.current.shape and not losses.requires_grad:
        return "losses without a gradient: compute them from `tokens.current`"
    return _check_tokens(losses, tokens.current)


def _check_correction(weights: Any, ratios: Tensor, _: Any) -> str | None:
    return _check_tokens(weights, ratios)


def _check_state(key: Any, *_: Any) -> str | None:
    try:
        hash(key)
    except TypeError:
        return f"a {type(key).__name__}, which cannot be hashed: return a string, a number, or a tuple of such"
    return None


def _check_rule(weight: Any, signal: Any) -> str | None:
    if weight is None or _is_number(weight):
        return None
    return f"{weight!r} for {signal.name}: return a finite number, or None"


def _check_length(values: Any, count: int, of: str) -> str | None:
    if not hasattr(values, "__len__") or isinstance(values, (str, dict, set)):
        return f"{_describe(values)} for {count} {of}: return one value for each"
    return f"{len(values)} values for {count} {of}: return one for each" if len(values) != count else None


def _check_numbers(values: Any, of: str) -> str | None:
    bad = [f"{value!r} for {of} {n}: return finite numbers" for n, value in enumerate(values) if not _is_number(value)]
    return bad[0] if bad else None


def _check_tokens(values: Any, like: Tensor) -> str | None:
    if not isinstance(values, Tensor) or values.shape != like.shape:
        return f"{_describe(values)} for {len(like)} tokens: return a tensor with one number for each"
    return None if bool(values.isfinite().all()) else "nan or infinity for some tokens: return finite numbers"


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)


FUNCTION_KINDS = {
    "algorithm.credit": FunctionKind(("rewards", "hyperparameters"), _check_credit),
    "algorithm.advantage": FunctionKind(("calls", "hyperparameters"), _check_advantage),
    "algorithm.aggregation": FunctionKind(("lengths", "hyperparameters"), _check_aggregation),
    "algorithm.loss": FunctionKind(("tokens", "hyperparameters"), _check_loss),
    "algorithm.correction": FunctionKind(("ratios", "hyperparameters"), _check_correction),
    "algorithm.state": FunctionKind(("episode", "call"), _check_state),
    "signals.rule": FunctionKind(("signal",), _check_rule),
}
