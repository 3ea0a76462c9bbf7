"""Aggregations combine the losses of all tokens of an optimiser update.

An aggregation takes the number of tokens of each selected call of each rollout and returns the weight of a token of
each call; the loss is the weighted sum. So the denominators are those of the whole update, however it is divided into
micro-batches.
"""

from collections.abc import Callable, Sequence

from leyden.config import Hyperparameters

Lengths = Sequence[Sequence[int]]
"""Tokens by rollout, then by call. A rollout without tokens does not count."""
Aggregation = Callable[[Lengths, Hyperparameters], list[list[float]]]


def count_rollouts(lengths: Lengths) -> int:
    """Count the rollouts that have tokens."""
    return sum(any(calls) for calls in lengths)
