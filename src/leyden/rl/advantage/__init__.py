"""The values of a group, turned into advantages.

An advantage function takes the values of the selected calls of each rollout, and the weight of each of those calls in
the group's statistics; it gives an advantage for each. In double precision throughout.
"""

from collections.abc import Callable, Sequence

Values = Sequence[Sequence[float]]
"""By rollout, then by call."""
Advantage = Callable[[Values, Values], list[list[float]]]


def call_weights(calls_R: Sequence[int], level: str) -> list[list[float]]:
    """How much each call counts: 1/(calls of its rollout) at the level of rollouts, 1 at that of transitions."""
    return [[1.0 if level == "transition" else 1.0 / calls] * calls for calls in calls_R]
