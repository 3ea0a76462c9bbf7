"""Where groups come from: each is named by its position in the run. Its task is the next one, a drawn or a hard one."""

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from statistics import fmean

from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import OpenGroup, PrefixRecord, TaskRecord
from leyden.orchestrator.rollouts.difficulty import Difficulty, is_informative
from leyden.orchestrator.rollouts.open_groups import RequestedGroup
from leyden.orchestrator.rollouts.prefixes import Prefixes
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.records import Task


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
        self.drawn: Mapping[str, Task] = {task.id: task for task in tasks.train} if difficulty is not None else {}
        """By id, the tasks that any group may have; empty: the task follows from the position."""
        self.position = position
        """How many groups were taken since the run began."""

    @property
    def record(self) -> TaskRecord:
        """What a run that is resumed needs to know of tasks."""
        return self._difficulty.record if self._difficulty is not None else TaskRecord()

    @property
    def prefixes(self) -> PrefixRecord:
        """What a run that is resumed needs to know of tasks that are continued."""
        return self._prefixes.record if self._prefixes is not None else PrefixRecord()

    def take(self, step: int, version: int, running: Collection[str]) -> RequestedGroup:
        """Take the next group; `step` is the one that it is meant for, `running` are the tasks of open groups."""
        position, place = self.position, None
        self.position += 1
        if self._prefixes is not None:
            if (continued := self._prefixes.take(position, version, step)) is not None:
                return self.again(continued)
            place = position - self._prefixes.continued
        draw = self._difficulty.draw(position, running) if self._difficulty is not None else None
        return self.again(OpenGroup(position, version, step, draw, place))

    def again(self, open: OpenGroup) -> RequestedGroup:
        """Return a group that was taken."""
        task = self.drawn.get(open.draw.task) if open.draw is not None else None
        name, origin = f"train-{open.position}", open.origin
        if origin is not None:  # another origin gives another group, if a resumed run chooses another
            digest = blake2b(f"{origin.attempt}/{origin.calls}".encode(), digest_size=4).hexdigest()
            name += f"-{digest}"
        task = task or self._tasks.at(open.position if open.place is None else open.place)
        return RequestedGroup(open, GroupSpec(name, task, self._size, step=open.step, origin=origin))

    def set_task(self, group: RequestedGroup, task: str) -> None:
        """Give a group the task that an earlier process has drawn for it."""
        if self._difficulty is not None and task != group.spec.task.id:
            group.spec = replace(group.spec, task=self.drawn[task])
            group.open = replace(group.open, draw=self._difficulty.drawn(task))

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
