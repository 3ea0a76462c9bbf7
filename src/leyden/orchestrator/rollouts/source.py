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

    def take(self, count: int, step: int) -> list[GroupSpec]:
        """Take the next groups; `step` is the one that asks for them."""
        positions = range(self.position, self.position + count)
        self.position = positions.stop
        return [GroupSpec(f"train-{one}", self._tasks.at(one), self._size, step=step) for one in positions]
