"""Branch functions choose the points of a rollout from which continuations are sampled.

A branch function takes a `Point` and `Hyperparameters` and returns whether continuations begin there. It sees the
calls up to the point and the other rollouts of the group, and nothing of what followed: so a point is chosen whatever
the calls after it were, and the gradient stays unbiased.
"""

from collections.abc import Callable

from msgspec import Struct

from leyden.config import Hyperparameters
from leyden.records import Call


class Point(Struct, frozen=True):
    """A point of a rollout: the end of one of its calls."""

    calls: tuple[Call, ...]
    """Those of the rollout so far, the last of which ends here."""
    others: tuple[tuple[Call, ...], ...]
    """All calls of each other rollout of the group."""


Branch = Callable[[Point, Hyperparameters], bool]
