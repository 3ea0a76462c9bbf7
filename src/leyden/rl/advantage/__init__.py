"""The values of an update's calls, turned into advantages.

An advantage function takes `CallBatch` and `Hyperparameters` and returns an advantage for each call, in float64. A call
with nothing to compare it with, or only equals, has advantage 0; nothing is ever divided by a number close to zero.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from leyden.rl.hyperparameters import Hyperparameters

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NOISE = 1e-7
"""Values this close, absolutely or as a share of the largest, are equal: single precision could not tell them apart."""


class CallBatch(Struct, frozen=True):
    """The calls of an optimiser update that carry credit, one entry each."""

    value: Floats
    """By the credit."""
    weight: Floats
    """In statistics, see `weights`."""
    group: Ints
    rollout: Ints
    """No number is in two groups."""
    part: Ints
    """Which part of a mixture its task is of: what is normalised over the whole update, is so within a part."""
    returns: Floats
    """Of its whole rollout."""
    baseline: Floats
    """What the critic had expected, 0 without one."""
    state: Ints
    """Equal numbers: the same state of the same group."""

    def mean(self, of: Floats, by: Ints) -> Floats:
        """The weighted mean of each class, for each of its calls."""
        return total(self.weight * of, by) / total(self.weight, by)

    def deviation(self, of: Floats, by: Ints) -> Floats:
        """The sample's deviation in each class, for each of its calls, with weights as frequencies.

        sqrt(sum w (x - mean)^2 / (sum w - 1)); 0 where a class is of one, or its values are equal but for noise.
        """
        more = total(self.weight, by) - 1
        squares = total(self.weight * (of - self.mean(of, by)) ** 2, by)
        deviation = np.sqrt(over(squares, np.where(more > _NOISE, more, 0.0)))
        return np.where(deviation > _NOISE * np.maximum(largest(np.abs(of), by), 1.0), deviation, 0.0)

    @property
    def alone(self) -> Bools:
        """Which calls are of a rollout that has no other beside it in its group."""
        return total(weights(self.rollout, "rollout"), self.group) < 1.5

    @property
    def comparable(self) -> Bools:
        """Which calls can be compared within their group: it has two rollouts, and not all values are equal."""
        return ~self.alone & (self.deviation(self.value, self.group) > 0)


Advantage = Callable[[CallBatch, Hyperparameters], Floats]


class GroupIndex(Struct, frozen=True):
    """In how many groups nobody can be compared."""

    alone: int
    """Of one rollout."""
    flat: int
    """Of more, but the values of all calls are equal; equal returns whose calls have different values are not flat."""


def groups(calls: CallBatch) -> GroupIndex:
    """Count the groups of an update."""
    numbers, firsts = np.unique(calls.group, return_index=True)
    alone = int(calls.alone[firsts].sum())
    return GroupIndex(alone, len(numbers) - alone - int(calls.comparable[firsts].sum()))


def weights(rollout: Ints, level: Literal["rollout", "transition"]) -> Floats:
    """What each call counts: 1/(calls of its rollout) at the level of rollouts, 1 at that of transitions."""
    ones = np.ones(len(rollout))
    return ones if level == "transition" else 1 / total(ones, rollout)


def total(of: Floats, by: Ints) -> Floats:
    """The sum of each class, for each of its members."""
    return _gathered(np.add, 0.0, of, by)


def largest(of: Floats, by: Ints) -> Floats:
    """The largest of each class, for each of its members."""
    return _gathered(np.maximum, -np.inf, of, by)


def _gathered(join: np.ufunc, start: float, of: Floats, by: Ints) -> Floats:
    classes, place = np.unique(by, return_inverse=True)
    found = np.full(len(classes), start)
    join.at(found, place, of)
    return found[place]


def over(above: Floats, below: Floats) -> Floats:
    """A quotient that is 0 where it would be divided by 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)
