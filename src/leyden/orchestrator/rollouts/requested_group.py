"""A group that was requested and not trained on yet, and what policies may learn from it."""

from collections.abc import Sequence

from msgspec import Struct, field

from leyden.api.wire import GroupSpec
from leyden.episodes import Episode
from leyden.learner.protocol import OpenGroup
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting


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
