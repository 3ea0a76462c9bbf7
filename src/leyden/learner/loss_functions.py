"""Checks what a user's loss and correction return."""

from typing import Any

from torch import Tensor

from leyden.learner.user_functions import FunctionKind
from leyden.rl.loss import TokenBatch


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


def _check_tokens(values: Any, like: Tensor) -> str | None:
    if not isinstance(values, Tensor) or values.shape != like.shape:
        return f"{_describe(values)} for {len(like)} tokens: return a tensor with one number for each"
    return None if bool(values.isfinite().all()) else "nan or infinity for some tokens: return finite numbers"


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


LOSS_FUNCTIONS = {
    "algorithm.loss": FunctionKind(("tokens", "hyperparameters"), _check_loss),
    "algorithm.correction": FunctionKind(("ratios", "hyperparameters"), _check_correction),
}
