"""Where groups come from: the tasks in their endless order, each group named by its position in the run."""

from leyden.api.wire import GroupSpec
from leyden.orchestrator.rollouts.tasks import Tasks


class GroupSource:
    """The groups of one run. A run that resumes from a position gets the same groups by the same names."""

    def __init__(self, tasks: Tasks, size: int, position: int) -> None:
        """`size` is the number of rollouts of a group."""
        self._tasks, self._size = tasks, size
        self.position = position
        """How many groups were taken since the run began."""

    def take(self, step: int) -> GroupSpec:
        """Take the next group; `step` is the one that it is meant for."""
        self.position += 1
        return self.at(self.position - 1, step)

    def at(self, position: int, step: int) -> GroupSpec:
        """Return a group by its position."""
        return GroupSpec(f"train-{position}", self._tasks.at(position), self._size, step=step)
