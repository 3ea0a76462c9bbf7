"""The losses of all tokens of an optimiser update, made one.

An aggregation takes how many tokens each selected call of each rollout has, and gives the weight of a token of each
call; the loss is the weighted sum. The denominators are thus those of the whole update, however it is divided.
"""

from collections.abc import Callable, Sequence

from leyden.rl.hyperparameters import Hyperparameters

Lengths = Sequence[Sequence[int]]
"""Tokens by rollout, then by call. A rollout without tokens counts for nothing."""
Aggregation = Callable[[Lengths, Hyperparameters], list[list[float]]]


def rollouts(lengths: Lengths) -> int:
    """How many rollouts have tokens."""
    return sum(any(calls) for calls in lengths)
