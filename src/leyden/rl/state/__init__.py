"""State keys: two calls of a group are in the same state if their keys are equal.

A state key takes an episode and one of its calls and returns something hashable.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.advantage import Ints, total

StateKey = Callable[[Episode, Call], Hashable]


def number_classes(groups: Sequence[int], keys: Sequence[Hashable]) -> Ints:
    """Number the distinct pairs of group and key: entries with the same group and key get the same number."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(pair, len(numbers)) for pair in zip(groups, keys, strict=True)], dtype=np.int64)


def shared_fraction(states: Ints) -> float:
    """Return the share of calls with another call in their state; the step level of `gigpo` compares only those."""
    return float((total(np.ones(len(states)), states) > 1.5).mean()) if len(states) else 0.0
