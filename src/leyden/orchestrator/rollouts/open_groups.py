"""The groups of a run that were requested and not trained on yet: when to request more, and which a step trains on.

With `training.max_staleness = K` and N tasks per step, at most (K + 1) N groups are open. While steps find all that
they take finished, these become fewer, down to 2 N: tokens need not be older then.
A step trains on the oldest N that are finished. It waits for a group that could only be trained on too late otherwise:
after any step, the groups that must be trained on within the next `j` steps are at most `j` N. So no token is older
than K publications when it is trained on, and nothing that was sampled is discarded.
"""

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct, field

from leyden.api.wire import GroupSpec
from leyden.config import TrainingConfig
from leyden.episodes import Episode
from leyden.learner.protocol import OpenGroup
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting
from leyden.orchestrator.publications import Publications
from leyden.outcomes import Ending


class Selection(Struct):
    """What one policy may learn from a group that has finished."""

    rollouts: Sequence[SelectedRollout] | None
    """The rollouts to train on; None: it teaches this policy nothing."""
    accounting: StepAccounting
    """What was counted."""


class RequestedGroup(Struct):
    """A group that is open."""

    open: OpenGroup
    spec: GroupSpec
    episodes: Sequence[Episode] | None = None
    """None: it is running."""
    selections: dict[str, Selection] = field(default_factory=dict)
    """By policy; empty: it is running."""

    @property
    def teaches(self) -> bool:
        """Whether it takes one of the places of a step, as far as is known."""
        return self.episodes is None or any(one.rollouts is not None for one in self.selections.values())


class OpenGroups:
    """The open groups of a run, oldest first."""

    def __init__(self, training: TrainingConfig, publications: Publications) -> None:
        self._per_step, self._max_staleness = training.tasks_per_step, training.max_staleness
        self._max_replaced = round(training.max_refill * training.tasks_per_step)
        self._publications = publications
        self._steps_open = 1
        """For how many steps groups are open; bounded by `max_staleness`."""
        self.groups: dict[str, RequestedGroup] = {}
        """By name."""

    @property
    def state(self) -> tuple[OpenGroup, ...]:
        """What a run that resumes requests again."""
        return tuple(group.open for group in self.groups.values())

    def begin_step(self) -> None:
        """Open groups for one step more if this one must wait for groups, and for one less if it need not."""
        finished = sum(group.teaches and group.episodes is not None for group in self._all)
        more = -1 if finished >= self._per_step else 1
        self._steps_open = max(2, min(self._steps_open + more, self._max_staleness + 1))

    def room(self, steps_left: int) -> int:
        """Return how many groups can be requested now, `steps_left` before the end of the run."""
        steps = min(self._steps_open, self._max_staleness + 1, steps_left)
        places = steps * self._per_step - self._not_replaced
        return places - sum(group.teaches for group in self._all)

    def take(self, again: Collection[int] = ()) -> list[RequestedGroup] | None:
        """Remove and return the groups of the next step in their order; None if it must wait.

        Groups that have finished and teach nothing are among them. `again` are the positions of those that the step has
        taken in an earlier process.
        """
        repeated = [group for group in self._all if group.open.position in again]
        found = repeated or self._choose()
        if found is None or any(group.episodes is None for group in found):
            return None
        for group in found:
            del self.groups[group.spec.id]
        return sorted(found, key=lambda group: group.open.position)

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
