"""The losses of all tokens of an optimiser update, made one.

An aggregation takes how many tokens each selected call of each rollout has, and gives the weight of a token of each
call; the loss is the weighted sum. The denominators are thus those of the whole update, however it is divided.
"""

from collections.abc import Callable, Sequence

Tokens = Sequence[Sequence[int]]
"""By rollout, then by call."""
Aggregation = Callable[[Tokens], list[list[float]]]
