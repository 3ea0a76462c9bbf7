"""Tokens are averaged inside a call, then over calls: a long call counts as much as a short one."""

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Lengths
from leyden.rl.registry import aggregation


@aggregation(divides_by="calls")
def call_mean(lengths: Lengths, hyperparameters: Hyperparameters) -> list[list[float]]:
    """w = 1 / (calls x tokens of the call)."""
    count = sum(tokens > 0 for calls in lengths for tokens in calls)
    return [[1 / (count * tokens) if tokens else 0.0 for tokens in calls] for calls in lengths]
