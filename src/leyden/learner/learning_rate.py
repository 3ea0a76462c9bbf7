"""The learning rate of a step: a peak, by default the larger the smaller the model is, times a factor by schedule."""

from itertools import pairwise
from math import cos, exp, log, pi

from leyden.config import TrainingConfig

_RATES = ((2e6, 8e-4), (135e6, 1e-5), (500e6, 3e-6), (8e9, 1e-6))
"""Parameters of the model, and the rate for training all of them. Beyond both ends it stays the same.

The first two sizes were measured here (the bundled model, SmolLM2-135M); the others are what practice uses for GRPO.
Rates between them are interpolated on logarithmic scales.
"""
_LORA = 10.0
"""Adapters take so many times the rate of their model."""


def default_learning_rate(parameters: int, lora: bool) -> float:
    """Return the learning rate for a model of so many parameters, with two digits."""
    size = min(max(parameters, _RATES[0][0]), _RATES[-1][0])
    (small, high), (large, low) = next(pair for pair in pairwise(_RATES) if size <= pair[1][0])
    rate = high * exp(log(low / high) * log(size / small) / log(large / small))
    return float(f"{_LORA * rate if lora else rate:.1e}")


def learning_rate_factor(config: TrainingConfig, step: int) -> float:
    """Return the factor in a step of the run, counted from 1: a linear warm-up, then the schedule.

    All updates of a step have the same.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return step / (warmup + 1)
    done = min(1.0, (step - 1 - warmup) / max(1, config.steps - warmup))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1 + cos(pi * done)) / 2
