"""The groups of a run that were requested and not trained on yet: when to request more, and which a step trains on.

With `training.max_staleness = K` and N tasks per step, at most (K + 1) N groups are open. While steps find all that
they take finished, these become fewer, down to 2 N: tokens need not be older then.
A step trains on the oldest N that are finished. It waits for a group that could only be trained on too late otherwise:
after any step, the groups that must be trained on within the next `j` steps are at most `j` N. So no token is older
than K publications when it is trained on, and nothing that was sampled is discarded.
"""

from collections.abc import Iterable, Sequence

from leyden.api.wire import GroupSpec
from leyden.config import TrainingConfig
from leyden.learner.protocol import OpenGroup, TrainerState
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.rollouts.requested_group import RequestedGroup
from leyden.orchestrator.rollouts.source import GroupSource
from leyden.orchestrator.rollouts.taken_groups import TakenGroups
from leyden.outcomes import Ending


class OpenGroups:
    """The open groups of a run, oldest first."""

    def __init__(
        self,
        training: TrainingConfig,
        source: GroupSource,
        publications: Publications,
        taken: TakenGroups,
        left_open: Sequence[OpenGroup] = (),
    ) -> None:
        """`left_open` are those of an earlier process. `publications` say how old a group is."""
        self._training, self._per_step, self._max_staleness = training, training.tasks_per_step, training.max_staleness
        self._max_replaced = round(training.max_refill * training.tasks_per_step)
        self._source, self._publications, self._taken = source, publications, taken
        self._steps_open = 1
        """For how many steps groups are open; bounded by `max_staleness`."""
        opened = map(source.again, left_open)
        self.groups: dict[str, RequestedGroup] = {group.spec.id: group for group in opened}
        """By name."""
        self._unrequested = [group.spec for group in self._all]

    def state(self, step: int) -> TrainerState:
        """Return what a run that resumes after a step must know of its groups."""
        source, groups = self._source, tuple(group.open for group in self._all)
        return TrainerState(
            step, position=source.position, open_groups=groups, task_record=source.record, prefixes=source.prefixes
        )

    def begin_step(self) -> None:
        """Open groups for one step more if this one must wait for groups, and for one less if it need not."""
        finished = sum(group.teaches and group.episodes is not None for group in self._all)
        more = -1 if finished >= self._per_step else 1
        self._steps_open = max(2, min(self._steps_open + more, self._max_staleness + 1))

    def request(self, step: int) -> list[GroupSpec]:
        """Open as many groups as there is room for, and all that a step repeats; return what is to be requested."""
        specs, self._unrequested = self._unrequested, []
        repeated = max(self._taken.of(step), default=-1) + 1 - self._source.position
        for _ in range(max(self._room(self._training.steps - step + 1), repeated)):
            meant_for = step + sum(group.teaches for group in self._all) // self._per_step
            running = {group.spec.task.id for group in self._all}
            group = self._source.take(meant_for, self._publications.newest, running)
            self.groups[group.spec.id] = group
            specs.append(group.spec)
        return specs

    def _room(self, steps_left: int) -> int:
        """Return how many groups can be requested now, `steps_left` before the end of the run."""
        steps = min(self._steps_open, self._max_staleness + 1, steps_left)
        places = steps * self._per_step - self._not_replaced
        return places - sum(group.teaches for group in self._all)

    def take(self, step: int) -> list[RequestedGroup] | None:
        """Remove and return the groups of a step in the order of their positions; None if it must wait.

        Groups that have finished and teach nothing are among them. A step that is repeated takes the same ones.
        """
        again = self._taken.of(step)
        repeated = [group for group in self._all if group.open.position in again]
        found = repeated or self._choose()
        if found is None or any(group.episodes is None for group in found):
            return None
        for group in found:
            del self.groups[group.spec.id]
        return sorted(found, key=lambda group: group.open.position)

    async def remember(self, step: int, groups: Sequence[RequestedGroup]) -> None:
        """Keep which groups a step takes, for when it is repeated."""
        await self._taken.add(step, [group.open.position for group in groups])

    def _choose(self) -> list[RequestedGroup] | None:
        due = [group for group in self._all if group.teaches]
        finished = [group for group in due if group.episodes is not None]
        taken = finished[: self._per_step]
        if len(taken) < self._per_step - self._not_replaced:
            return None
        if len(finished) < len(due) and not self._leaves_enough_places(due, taken):
            return None
        return [*taken, *(group for group in self._all if not group.teaches)]

    @property
    def _all(self) -> Iterable[RequestedGroup]:
        return self.groups.values()

    @property
    def _not_replaced(self) -> int:
        """Groups that teach nothing and are too many for one step to replace.

        While nothing that the step collected has succeeded, all are: too many failures in a row end the run.
        """
        useless = [group for group in self._all if not group.teaches]
        succeeded = any(
            one.rollouts is not None or one.accounting.outcomes[Ending.SUCCEEDED]
            for group in self._all
            for one in group.selections.values()
        )
        return min(self._per_step, max(0, len(useless) - self._max_replaced)) if succeeded else 0

    def _leaves_enough_places(self, due: Sequence[RequestedGroup], taken: Sequence[RequestedGroup]) -> bool:
        """Whether the steps after this one have places for all groups before they are too old."""
        steps_left = [self._max_staleness - self._publications.staleness(group.open.version) for group in due]
        left = [steps for group, steps in zip(due, steps_left, strict=True) if group not in taken]
        return all(
            sum(steps <= later for steps in left) <= later * self._per_step for later in range(self._max_staleness + 1)
        )
