"""Draws tasks by the chance that their next group of rollouts is informative: that not all its rewards are equal.

The success rate p of a task has a Beta posterior of its recent rollouts, and older ones are forgotten, since the policy
changes. A group of G is informative with the expected chance E[1 - p^G - (1 - p)^G]. The prior is that of the tasks
themselves: a task of which nothing is known is informative as often as the first groups of tasks were lately.
"""

from collections.abc import Collection, Iterable, Sequence
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from leyden.learner.protocol import TaskDraw, TaskRecord
from leyden.records import Task

_FLOOR = 0.1
"""The share of draws in which all tasks are equally likely, so that none is forgotten."""
_KEPT_PER_STEP, _KEPT_PER_GROUP, _KEPT_OF_FIRST = 0.97, 0.5, 0.98
"""The shares of counts that are kept: of a task's after a step, of a task's when it has a new group, and of those of
first groups after another one."""
_FORGOTTEN = 0.1
"""A task with fewer rollouts than this counts as one that was never seen."""
_PRIORS = 0.01, 1.0
"""The least and the greatest parameter of the prior: success rates near 0 and 1, and all success rates alike."""

Floats = NDArray[np.float64]


class Difficulty:
    """What is known of the success rates of tasks."""

    def __init__(self, tasks: Sequence[Task], seed: int, group_size: int, success: float, record: TaskRecord) -> None:
        """A rollout succeeds if its reward is at least `success`. `record` is that of a run that is resumed."""
        self._tasks, self._seed, self._size, self._success = tasks, seed, group_size, success
        self._index = {task.id: index for index, task in enumerate(tasks)}
        self._counts = np.zeros((len(tasks), 2))
        for task, counts in record.rollouts.items():
            if task in self._index:
                self._counts[self._index[task]] = counts
        self._first = np.array(record.first)
        self._update_chances()

    @property
    def known(self) -> int:
        """Of how many tasks the success rate is known."""
        return int(np.count_nonzero(self._counts.any(axis=1)))

    @property
    def record(self) -> TaskRecord:
        """What a run that is resumed needs to know."""
        known: list[int] = np.flatnonzero(self._counts.any(axis=1)).tolist()
        counts: list[tuple[float, float]] = self._counts[known].tolist()
        rollouts = {self._tasks[index].id: both for index, both in zip(known, counts, strict=True)}
        return TaskRecord(rollouts, tuple(self._first.tolist()))

    def draw(self, position: int, running: Collection[str]) -> TaskDraw:
        """Draw the task of the group at a position: one that is not running, if there is one."""
        probabilities = self._probabilities(running)
        until = np.cumsum(probabilities)
        place = Random(f"{self._seed}/by_difficulty/{position}").random() * until[-1]
        return self._drawn(int(np.searchsorted(until, place, side="right")), probabilities)

    def drawn(self, task: str) -> TaskDraw:
        """Return what a draw of this task now is."""
        return self._drawn(self._index[task], self._probabilities(()))

    def add_step(self, groups: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Add the rewards of the groups of a step, each with its task."""
        self._counts *= _KEPT_PER_STEP
        for task, rewards in groups:
            if task in self._index and len(rewards) > 1:
                self._add(self._counts[self._index[task]], rewards)
        self._counts[self._counts.sum(axis=1) < _FORGOTTEN] = 0
        self._update_chances()

    def _add(self, counts: Floats, rewards: Sequence[float]) -> None:
        succeeded = count_successes(rewards, self._success)
        if not counts.any():
            informative = is_informative(rewards)
            self._first = self._first * _KEPT_OF_FIRST + (informative, not informative)
        counts *= _KEPT_PER_GROUP
        counts += succeeded, len(rewards) - succeeded

    def _update_chances(self) -> None:
        low, high = _PRIORS
        wanted = self._first[0] / self._first.sum()
        for _ in range(40):
            middle = (low * high) ** 0.5
            if informative_chance(np.zeros(2), middle, self._size) < wanted:
                low = middle
            else:
                high = middle
        self._chances = informative_chance(self._counts, high, self._size)

    def _probabilities(self, running: Collection[str]) -> Floats:
        free = np.ones(len(self._tasks))
        free[[self._index[task] for task in running if task in self._index]] = 0
        if not free.any():
            free[:] = 1
        weights = free * self._chances**2
        found: Floats = _FLOOR * free / free.sum() + (1 - _FLOOR) * weights / weights.sum()
        return found

    def _drawn(self, index: int, probabilities: Floats) -> TaskDraw:
        return TaskDraw(self._tasks[index].id, float(self._chances[index]), float(probabilities[index]))


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ."""
    return min(rewards) != max(rewards)


def count_successes(rewards: Sequence[float], success: float) -> int:
    """Count the rewards of a group that are at least `success`.

    If all or none are and they differ, the threshold says nothing about rewards like these: their mean divides them.
    """
    succeeded = sum(reward >= success for reward in rewards)
    if succeeded in (0, len(rewards)) and rewards and is_informative(rewards):
        return sum(reward > fmean(rewards) for reward in rewards)
    return succeeded


def informative_chance(counts: Floats, prior: float, size: int) -> Floats:
    """Return the expected chance that a group of `size` both succeeds and fails; `counts` end with both numbers."""
    succeeded, failed = counts[..., 0] + prior, counts[..., 1] + prior
    all_succeed, all_fail = np.ones_like(succeeded), np.ones_like(failed)
    for number in range(size):
        all_succeed *= (succeeded + number) / (succeeded + failed + number)
        all_fail *= (failed + number) / (succeeded + failed + number)
    return 1 - all_succeed - all_fail
