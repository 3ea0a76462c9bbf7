"""Group relative policy optimisation: how far above its group's mean a value lies, in deviations of the group."""

from math import sqrt

from leyden.rl.advantage import Values

EPSILON = 1e-6
"""Below this deviation a group says nothing: all its advantages are 0."""


def grpo(values: Values, weights: Values) -> list[list[float]]:
    """A = (V - mean) / deviation, with the sample's deviation: its weights, less one, are what it divides by."""
    pairs = [pair for row in zip(values, weights, strict=True) for pair in zip(*row, strict=True)]
    total = sum(weight for _, weight in pairs)
    if total <= 1:
        return [[0.0] * len(row) for row in values]
    mean = sum(weight * value for value, weight in pairs) / total
    deviation = sqrt(sum(weight * (value - mean) ** 2 for value, weight in pairs) / (total - 1))
    if deviation < EPSILON:
        return [[0.0] * len(row) for row in values]
    return [[(value - mean) / deviation for value in row] for row in values]
