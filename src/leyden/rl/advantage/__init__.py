"""Advantage functions turn the values of an update's calls into advantages.

An advantage function takes `CallBatch` and `Hyperparameters` and returns an advantage for each call, in float64. A call
that has nothing to be compared with, or only equal values, has advantage 0. Deviations that divide have a floor, so
small differences give small advantages.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from leyden.config import Hyperparameters

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PRIOR = 2.0
"""How many rollouts a guess counts as, see `CallBatch.expected`; `benchmarks/baselines.py` compares others."""
_NOISE = 1e-7
"""Values this close, absolutely or relative to the largest, count as equal: single precision cannot separate them."""


class CallBatch(Struct, frozen=True):
    """The calls of an optimiser update that carry credit, one entry each."""

    value: Floats
    """From the credit."""
    weight: Floats
    """In statistics, see `weights`."""
    group: Ints
    rollout: Ints
    """Numbered over all groups."""
    kind: Ints
    """The value of its task under `algorithm.normalize_by`: global normalisation is done within each kind."""
    returns: Floats
    """Of its whole rollout."""
    baseline: Floats
    """The critic's value of the state before the call; 0 without a critic."""
    state: Ints
    """Calls with equal numbers are in the same state of the same group."""
    situation: Ints | None = None
    """Calls with equal numbers had the same role, or the same role and turn (`algorithm.compare`), in any group. None:
    calls are compared whatever their situation."""
    known: Floats | None = None
    """The value of the state before each call, as continuations estimate it: what is expected of the call. NaN, or
    None for all: it is not known."""

    def mean(self, of: Floats, by: Ints) -> Floats:
        """Return the weighted mean of each class, for each of its calls."""
        return total(self.weight * of, by) / total(self.weight, by)

    def expected(self, by: Ints, leave_out: bool = False) -> Floats:
        """Return the value to expect of each call: the mean of its class, or of those of its class in its situation.

        Those are often few. So in their mean, where each rollout counts once, a guess counts as `_PRIOR` rollouts: the
        level of the class plus what the situation adds to it in other classes. It counts for less if few others were in
        that situation. With `leave_out`, the call's own rollout has no influence.
        """
        if self.known is not None:
            unknown = np.isnan(self.known)
            found = self.known.copy()
            found[unknown] = self._only(unknown).expected(by[unknown], leave_out)
            return found

        def add_up(of: Floats, classes: Ints) -> Floats:
            return total(of, classes) - (total(of, joined(classes, self.rollout)) if leave_out else 0.0)

        if self.situation is None:
            return over(add_up(self.weight * self.value, by), add_up(self.weight, by))
        cell, weight = joined(by, self.situation), self._weight_in_situation
        above = weight * (self.value - self.mean(self.value, by))
        others = total(weight, self.situation) - total(weight, cell)
        effect = (total(above, self.situation) - total(above, cell)) / (others + 1)
        level = over(add_up(self.weight * (self.value - effect), by), add_up(self.weight, by))
        prior = _PRIOR * np.where(total(weight, cell) > 1.5, others / (others + 1), 1.0)
        return (add_up(weight * self.value, cell) + prior * (level + effect)) / (add_up(weight, cell) + prior)

    def above(self, by: Ints, leave_out: bool = False) -> Floats:
        """Return how far each value is above the expected one; 0 if they are equal up to rounding."""
        difference = self.value - self.expected(by, leave_out)
        return np.where(np.abs(difference) > _NOISE * np.maximum(np.abs(self.value), 1.0), difference, 0.0)

    def deviation(self, of: Floats, by: Ints) -> Floats:
        """Return the sample standard deviation of each class, for each of its calls, with weights as frequencies.

        sqrt(sum w (x - mean)^2 / (sum w - 1)); 0 if a class has one member, or its values are equal up to rounding.
        """
        more = total(self.weight, by) - 1
        squares = total(self.weight * (of - self.mean(of, by)) ** 2, by)
        deviation = np.sqrt(over(squares, np.where(more > _NOISE, more, 0.0)))
        return np.where(deviation > _NOISE * np.maximum(largest(np.abs(of), by), 1.0), deviation, 0.0)

    @property
    def alone(self) -> Bools:
        """Which calls belong to the only rollout of their group."""
        return total(weights(self.rollout, "rollout"), self.group) < 1.5

    @property
    def comparable(self) -> Bools:
        """Which calls can be compared within their group: it has at least two rollouts, and values that differ.

        If situations are compared, values of one situation differ, or one situation has a single rollout.
        """
        if self.known is not None:
            return ~self.alone & (largest(np.abs(self.above(self.group)), self.group) > 0)
        differs = self.deviation(self.value, self.group) > 0
        if self.situation is not None:
            cell, weight = joined(self.group, self.situation), self._weight_in_situation
            within = replace(self, weight=weight).deviation(self.value, cell) > 0
            differs &= largest(np.where(within | (total(weight, cell) < 1.5), 1.0, 0.0), self.group) > 0
        return ~self.alone & differs

    def _only(self, chosen: Bools) -> "CallBatch":
        """Return some of the calls, whose rollouts have the same weight as with all of theirs; nothing is known."""
        fields = {name: found[chosen] for name in self.__struct_fields__ if (found := getattr(self, name)) is not None}
        of_rollout = total(self.weight, self.rollout)[chosen]
        weight = fields["weight"] * of_rollout / total(fields["weight"], fields["rollout"])
        return CallBatch(**{**fields, "weight": weight, "known": None})

    @property
    def _weight_in_situation(self) -> Floats:
        """The weight of each call among those in its situation: each rollout counts once."""
        assert self.situation is not None
        return weights(joined(self.rollout, self.situation), "rollout")


Advantage = Callable[[CallBatch, Hyperparameters], Floats]


class GroupCounts(Struct, frozen=True):
    """Counts of groups that have nothing to compare."""

    alone: int
    """Groups of one rollout."""
    flat: int
    """Groups of several rollouts whose calls all have the same value."""


def count_groups(calls: CallBatch) -> GroupCounts:
    """Count the groups of an update that have nothing to compare."""
    numbers, firsts = np.unique(calls.group, return_index=True)
    alone = int(calls.alone[firsts].sum())
    return GroupCounts(alone, len(numbers) - alone - int(calls.comparable[firsts].sum()))


def weights(rollout: Ints, level: Literal["rollout", "transition"]) -> Floats:
    """Return the weight of each call in statistics: 1/(calls of its rollout) at level `rollout`, else 1."""
    ones = np.ones(len(rollout))
    return ones if level == "transition" else 1 / total(ones, rollout)


def total(of: Floats, by: Ints) -> Floats:
    """Return the sum of each class, for each of its members."""
    return _gathered(np.add, 0.0, of, by)


def joined(one: Ints, other: Ints) -> Ints:
    """Number the pairs of a class of one kind and a class of another."""
    (_, first), (_, second) = (np.unique(classes, return_inverse=True) for classes in (one, other))
    return first * (int(second.max(initial=0)) + 1) + second


def largest(of: Floats, by: Ints) -> Floats:
    """Return the largest of each class, for each of its members."""
    return _gathered(np.maximum, -np.inf, of, by)


def _gathered(join: np.ufunc, start: float, of: Floats, by: Ints) -> Floats:
    classes, index = np.unique(by, return_inverse=True)
    found = np.full(len(classes), start)
    join.at(found, index, of)
    return found[index]


def standardised(difference: Floats, deviation: Floats, floor: float) -> Floats:
    """Divide by the deviation, or by the floor if that is larger; 0 if the deviation is 0.

    Without a floor the size of rewards has no influence: a reward that is annealed to 0 counts in full until it is 0.
    """
    return over(difference, np.where(deviation > 0, np.maximum(deviation, floor), 0.0))


def over(above: Floats, below: Floats) -> Floats:
    """Divide; 0 if the divisor is 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)
