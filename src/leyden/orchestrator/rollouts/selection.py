"""Rewards the rollouts of a group that has finished, and selects what each policy may learn from them."""

from collections.abc import Mapping, Sequence
from functools import partial

from leyden.api.client import Remote
from leyden.config import TrainingConfig
from leyden.episodes import Episode
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.advantages import teaches
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting, leave_out, select_rollouts
from leyden.orchestrator.early_gradient import EarlyGradient
from leyden.orchestrator.rollouts.requested_group import Selection
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.user_code.bridge import call_in_thread


class GroupSelector:
    """Selects from the groups of a run."""

    def __init__(
        self,
        training: TrainingConfig,
        algorithms: Mapping[str, Algorithm],
        remote: Remote,
        early: EarlyGradient | None = None,
    ) -> None:
        """`algorithms` are those of the policies in training. `early` gets the groups of the only policy at once."""
        self._replaces_flat, self._algorithms = training.flat_groups == "refill", algorithms
        self._signals = next(iter(algorithms.values())).signals  # they are those of the run
        self._remote, self._early = remote, early

    async def select(self, found: Sequence[Episode], step: int) -> tuple[list[Episode], dict[str, Selection]]:
        """Return the rollouts with their automatic rewards, and what is selected for each policy."""
        episodes = await reward_automatically(self._remote, found, self._signals, step)
        selections = {name: await self._select(episodes, one) for name, one in self._algorithms.items()}
        for selection in selections.values():
            if self._early is not None and selection.rollouts is not None:
                self._early.add(selection.rollouts)
        return episodes, selections

    async def _select(self, episodes: Sequence[Episode], algorithm: Algorithm) -> Selection:
        accounting = StepAccounting()
        selected = select_rollouts(episodes, algorithm.sample_filter, accounting)
        if selected is not None and await self._is_replaced(selected, algorithm):
            leave_out(selected, "flat group", accounting)
            accounting.groups_flat += 1
            selected = None
        return Selection(selected, accounting)

    async def _is_replaced(self, group: Sequence[SelectedRollout], algorithm: Algorithm) -> bool:
        if not self._replaces_flat:
            return False
        return not await call_in_thread(partial(teaches, group, algorithm.advantage_estimator))
