"""The default learning rate: the smaller a model, the larger.

The first two sizes were measured here (the bundled model, SmolLM2-135M); the others are what practice uses for GRPO.
Rates between them are interpolated on logarithmic scales.
"""

from itertools import pairwise
from math import exp, log

_RATES = ((2e6, 8e-4), (135e6, 1e-5), (500e6, 3e-6), (8e9, 1e-6))
"""Parameters of the model, and the rate for training all of them. Beyond both ends it stays the same."""
_LORA, _LORA_MAX = 10.0, 1e-3
"""Adapters take ten times the rate of their model, up to a limit."""


def default_learning_rate(parameters: int, lora: bool) -> float:
    """Return the learning rate for a model of so many parameters, with two digits."""
    size = min(max(parameters, _RATES[0][0]), _RATES[-1][0])
    (small, high), (large, low) = next(pair for pair in pairwise(_RATES) if size <= pair[1][0])
    rate = high * exp(log(low / high) * log(size / small) / log(large / small))
    return float(f"{min(_LORA * rate, _LORA_MAX) if lora else rate:.1e}")
