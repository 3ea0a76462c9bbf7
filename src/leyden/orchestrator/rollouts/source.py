"""Where groups come from: each is named by its position in the run. Its task is the next one, a drawn or a hard one."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import OpenGroup, PrefixRecord, TaskRecord
from leyden.orchestrator.rollouts.difficulty import Difficulty, is_informative
from leyden.orchestrator.rollouts.prefixes import Prefixes
from leyden.orchestrator.rollouts.requested_group import RequestedGroup
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.records import Group, Task


def group_name(position: int) -> str:
    """Return the name of the group at a position of the run."""
    return f"train-{position}"


class GroupSource:
    """The groups of one run. A run that resumes from a position gets the same groups by the same names."""

    def __init__(
        self,
        tasks: Tasks,
        size: int,
        position: int,
        difficulty: Difficulty | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`size` is the number of rollouts of a group. Without `difficulty` tasks are shuffled."""
        self._tasks, self._size, self._difficulty, self._prefixes = tasks, size, difficulty, prefixes
        by_position = difficulty is None and prefixes is None
        self.drawn: Mapping[str, Task] = {} if by_position else {task.id: task for task in tasks.train}
        """By id, the tasks that any group may have; empty: the task follows from the position."""
        self.position = position
        """How many groups were taken since the run began."""
        self.kept: dict[int, Group] = {}
        """By position, the groups that an earlier process has requested and that were not taken yet."""

    @property
    def record(self) -> TaskRecord:
        """What a run that is resumed needs to know of tasks."""
        return self._difficulty.record if self._difficulty is not None else TaskRecord()

    @property
    def prefixes(self) -> PrefixRecord:
        """What a run that is resumed needs to know of tasks that are continued."""
        return self._prefixes.record if self._prefixes is not None else PrefixRecord()

    def take(self, step: int, version: int, running: Collection[str]) -> RequestedGroup:
        """Take the next group; `step` is the one that it is meant for, `running` are the tasks of open groups.

        One that an earlier process has requested keeps its task and its origin, whatever would be chosen now.
        """
        position, draw, task = self.position, None, None
        self.position += 1
        kept = self.kept.pop(position, None)
        if kept is not None and kept.task not in self.drawn:  # to request another is refused, with the reason
            kept = None
        if self._prefixes is not None:
            found = self._prefixes.keep(kept) if kept is not None else self._prefixes.take(position)
            if found is not None:
                return self.again(replace(found, position=position, version=version, step=step))
            task = kept.task if kept is not None else self._tasks.at(position - self._prefixes.continued).id
        if self._difficulty is not None:
            draw, task = self._difficulty.draw(position, running), None
            if kept is not None and draw.task != kept.task:
                draw = self._difficulty.drawn(kept.task)
        return self.again(OpenGroup(position, version, step, draw, task))

    def again(self, open: OpenGroup) -> RequestedGroup:
        """Return a group that was taken."""
        task = self.drawn.get(open.draw.task if open.draw is not None else open.task or "")
        task = task or self._tasks.at(open.position)
        return RequestedGroup(
            open, GroupSpec(group_name(open.position), task, self._size, step=open.step, origin=open.origin)
        )

    def add_step(self, groups: Sequence[RequestedGroup], step: int, failure_reward: float) -> dict[str, float]:
        """Add the groups of a step to what is known of tasks; return its metrics."""
        if self._prefixes is not None:
            self._prefixes.add_step(groups, step)
        groups = [group for group in groups if group.open.origin is None]
        if self._difficulty is None or not groups:
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
