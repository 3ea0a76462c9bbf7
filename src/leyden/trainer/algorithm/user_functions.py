"""A user's own function in the place of one of ours: called with as much, held to as much, and named where it errs."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from msgspec import Struct
from torch import Tensor

from leyden.config import ConfigError
from leyden.loading import LoadError, load_function, one_line, placeholder_keys
from leyden.rl.advantage import CallBatch
from leyden.rl.credit import RolloutRewards
from leyden.rl.loss import TokenBatch
from leyden.trainer.errors import TrainingError


class FunctionKind(Struct, frozen=True):
    """Where a function of one's own may stand."""

    given: tuple[str, ...]
    """What it is called with."""
    wrong: Callable[..., str | None]
    """What is wrong with what it gave for that, in words; None where nothing is."""


def load_user_function(key: str, reference: str, base: str) -> Callable[..., Any]:
    """The user's function that the configuration names under `key`."""
    place = FUNCTION_KINDS[key]
    try:
        with placeholder_keys():
            function = load_function(reference, base)
    except LoadError as error:
        raise ConfigError(f"`{key}`: {error}") from error
    try:
        inspect.signature(function).bind(*place.given)
    except TypeError as error:
        raise ConfigError(f"`{key}`: {reference!r} is called with ({', '.join(place.given)}): {error}") from error
    except ValueError:  # one written in C does not say what it takes
        pass

    @wraps(function)
    def called(*given: Any) -> Any:
        try:
            found = function(*given)
        except Exception as error:
            raise TrainingError(f"`{key}` failed: {one_line(error)}") from error
        if (what := place.wrong(found, *given)) is not None:
            raise TrainingError(f"`{key}` gave {what}")
        return found

    return called


def _credit(found: Any, rewards: RolloutRewards, _: Any) -> str | None:
    if (what := _not_one_each(found, len(rewards.steps), "calls")) is not None:
        return what
    bad = [f"{value!r} for call {n}" for n, value in enumerate(found) if value is not None and not _is_number(value)]
    return f"{bad[0]} of a rollout: return a finite number, or None" if bad else None


def _advantage(found: Any, calls: CallBatch, _: Any) -> str | None:
    if (what := _not_one_each(found, len(calls.value), "calls")) is not None:
        return what
    return _first_bad(found, "call")


def _aggregation(found: Any, lengths: Sequence[Sequence[int]], _: Any) -> str | None:
    if (what := _not_one_each(found, len(lengths), "rollouts")) is not None:
        return what
    for weights, calls in zip(found, lengths, strict=True):
        if (
            what := _not_one_each(weights, len(calls), "calls of a rollout") or _first_bad(weights, "call")
        ) is not None:
            return what
    return None


def _loss(found: Any, tokens: TokenBatch, _: Any) -> str | None:
    match found:
        case (Tensor() as losses, dict() as metrics):
            pass
        case _:
            return (
                f"a {type(found).__name__}: return the losses of the tokens, and a dict of metrics (which may be empty)"
            )
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape != tokens.current.shape:
            return f"{_described(metric)} for the metric {name!r}: return one number for each token"
    if losses.shape == tokens.current.shape and not losses.requires_grad:
        return "losses without a gradient: compute them from `tokens.current`"
    return _not_of_tokens(losses, tokens.current)


def _correction(found: Any, ratios: Tensor, _: Any) -> str | None:
    return _not_of_tokens(found, ratios)


def _state(found: Any, *_: Any) -> str | None:
    try:
        hash(found)
    except TypeError:
        return f"a {type(found).__name__}, which cannot be hashed: return a string, a number, or a tuple of such"
    return None


def _rule(found: Any, signal: Any) -> str | None:
    if found is None or _is_number(found):
        return None
    return f"{found!r} for {signal.name}: return a finite number, or None"


def _not_one_each(found: Any, count: int, of: str) -> str | None:
    if not hasattr(found, "__len__") or isinstance(found, (str, dict, set)):
        return f"{_described(found)} for {count} {of}: return one value for each"
    return f"{len(found)} values for {count} {of}: return one for each" if len(found) != count else None


def _first_bad(found: Any, of: str) -> str | None:
    bad = [f"{value!r} for {of} {n}: return finite numbers" for n, value in enumerate(found) if not _is_number(value)]
    return bad[0] if bad else None


def _not_of_tokens(found: Any, like: Tensor) -> str | None:
    if not isinstance(found, Tensor) or found.shape != like.shape:
        return f"{_described(found)} for {len(like)} tokens: return one number for each"
    return None if bool(found.isfinite().all()) else "what is not a number for some of the tokens"


def _described(found: Any) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)


FUNCTION_KINDS = {
    "algorithm.credit": FunctionKind(("rewards", "hyperparameters"), _credit),
    "algorithm.advantage": FunctionKind(("calls", "hyperparameters"), _advantage),
    "algorithm.aggregation": FunctionKind(("lengths", "hyperparameters"), _aggregation),
    "algorithm.loss": FunctionKind(("tokens", "hyperparameters"), _loss),
    "algorithm.correction": FunctionKind(("ratios", "hyperparameters"), _correction),
    "algorithm.state": FunctionKind(("episode", "call"), _state),
    "signals.rule": FunctionKind(("signal",), _rule),
}
