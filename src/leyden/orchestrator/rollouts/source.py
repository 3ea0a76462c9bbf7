"""Where groups come from: each is named by its position in the run, and its task is the next one or a drawn one."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import OpenGroup, TaskRecord
from leyden.orchestrator.rollouts.difficulty import Difficulty, is_informative
from leyden.orchestrator.rollouts.open_groups import RequestedGroup
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.records import Task


class GroupSource:
    """The groups of one run. A run that resumes from a position gets the same groups by the same names."""

    def __init__(self, tasks: Tasks, size: int, position: int, difficulty: Difficulty | None = None) -> None:
        """`size` is the number of rollouts of a group. Without `difficulty` tasks are shuffled."""
        self._tasks, self._size, self._difficulty = tasks, size, difficulty
        self.drawn: Mapping[str, Task] = {task.id: task for task in tasks.train} if difficulty is not None else {}
        """By id, the tasks that any group may have; empty: the task follows from the position."""
        self.position = position
        """How many groups were taken since the run began."""

    @property
    def record(self) -> TaskRecord:
        """What a run that is resumed needs to know of tasks."""
        return self._difficulty.record if self._difficulty is not None else TaskRecord()

    def take(self, step: int, version: int, running: Collection[str]) -> RequestedGroup:
        """Take the next group; `step` is the one that it is meant for, `running` are the tasks of open groups."""
        draw = self._difficulty.draw(self.position, running) if self._difficulty is not None else None
        self.position += 1
        return self.again(OpenGroup(self.position - 1, version, step, draw))

    def again(self, open: OpenGroup) -> RequestedGroup:
        """Return a group that was taken."""
        task = self.drawn.get(open.draw.task) if open.draw is not None else None
        spec = GroupSpec(f"train-{open.position}", task or self._tasks.at(open.position), self._size, step=open.step)
        return RequestedGroup(open, spec)

    def set_task(self, group: RequestedGroup, task: str) -> None:
        """Give a group the task that an earlier process has drawn for it."""
        if self._difficulty is not None and task != group.spec.task.id:
            group.spec = replace(group.spec, task=self.drawn[task])
            group.open = replace(group.open, draw=self._difficulty.drawn(task))

    def add_step(self, groups: Sequence[RequestedGroup], failure_reward: float) -> dict[str, float]:
        """Add the groups of a step to what is known of tasks; return its metrics."""
        if self._difficulty is None:
            return {}
        rewards_G = [
            [reward for one in group.episodes or () if (reward := one.final_reward(failure_reward)) is not None]
            for group in groups
        ]
        self._difficulty.add_step(
            (group.spec.task.id, rewards) for group, rewards in zip(groups, rewards_G, strict=True)
        )
        draws = [group.open.draw for group in groups if group.open.draw is not None]
        return {
            "known": self._difficulty.known,
            "chance": fmean(draw.chance for draw in draws),
            "informative": fmean(len(rewards) > 1 and is_informative(rewards) for rewards in rewards_G),
            "preference": fmean(draw.probability for draw in draws) * len(self.drawn),
        }
