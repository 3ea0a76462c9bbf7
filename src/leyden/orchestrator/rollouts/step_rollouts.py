"""Collects the groups of a step: requests groups, waits for them, and replaces those that teach nothing."""

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from leyden.config import Config
from leyden.config.policies import role_routes
from leyden.episodes import Episode
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.credit.samples import Groups
from leyden.orchestrator.health.health import Health
from leyden.orchestrator.health.roles import check_roles
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.branching import Branching
from leyden.orchestrator.rollouts.collector import MAX_WAIT_S, Gathering, RolloutCollector
from leyden.orchestrator.rollouts.open_groups import OpenGroups
from leyden.orchestrator.rollouts.selection import GroupSelector
from leyden.orchestrator.rollouts.source import GroupSource, group_name
from leyden.orchestrator.rollouts.time_split import split_sampling


class StepRollouts:
    """Collects the rollouts of steps."""

    def __init__(
        self,
        config: Config,
        source: GroupSource,
        groups: OpenGroups,
        selector: GroupSelector,
        branching: Branching | None,
        collector: RolloutCollector,
        health: Health,
        reports: Reports,
    ) -> None:
        """`branching` continues rollouts of the only policy, if its credit needs that."""
        self._config, self._source, self._open, self._selector = config, source, groups, selector
        self._branching, self._collector, self._gathering = branching, collector, Gathering(collector)
        self._health, self._reports, self._role_routes = health, reports, role_routes(config)
        self._earlier = {*groups.groups}
        """The groups that an earlier process has requested: their failures have been counted."""
        self._unchecked: list[Sequence[Episode]] = []
        """Of groups that have finished since failures were last counted."""

    def state(self, step: int) -> TrainerState:
        """Return what a run that resumes after a step must know of its rollouts."""
        return replace(self._open.state(step), branch_debt=self._branching.debt if self._branching is not None else 0.0)

    async def resume(self) -> None:
        """Find the groups that an earlier process has requested since its checkpoint: they keep their tasks."""
        self._source.kept = await self._collector.find_from(self._source.position)
        self._earlier.update(map(group_name, self._source.kept))

    async def collect(self, reports: Mapping[str, StepReport]) -> tuple[dict[str, Groups], list[Episode]]:
        """Collect the groups of a step in the order of their positions.

        Returns the groups that each policy may learn from, and every episode of the step, also of dropped groups.
        `reports` has one report for each policy.
        """
        report = next(iter(reports.values()))
        started, times = time.monotonic(), await self._collector.call_times()
        if self._gathering.waiting:
            await self._gather(report.step, wait_s=0)
        self._open.begin_step()
        await self._request(report.step)
        while (taken := self._open.take(report.step)) is None:
            await self._gather(report.step)
            await self._request(report.step)
            if not self._gathering.waiting or len(self._unchecked) >= self._config.training.tasks_per_step:
                self._check_streak()
        self._check_streak()
        await self._open.remember(report.step, taken)
        episodes = [episode for group in taken for episode in group.episodes or ()]
        report.tasks = self._source.add_step(taken, report.step, self._config.rollout.failure_reward)
        groups: dict[str, Groups] = {}
        for name, other in reports.items():
            selections = [group.selections[name] for group in taken]
            groups[name] = [one.rollouts for one in selections if one.rollouts is not None]
            for one in selections:
                other.accounting.add(one.accounting)
        if self._branching is not None:
            groups[report.policy], continuations = await self._branching.extend(groups[report.policy], episodes, report)
            episodes += continuations
        check_roles(episodes, self._role_routes)
        self._reports.warn(self._health.add_rollouts(f"step {report.step}", episodes))
        report.sampling_s = time.monotonic() - started
        if not report.overlaps:  # otherwise most of the calls are of other steps
            calls = (await self._collector.call_times()).since(times)
            report.sampling_split = split_sampling(report.sampling_s, episodes, calls, report.started)
        for other in reports.values():
            other.tasks, other.sampling_s, other.sampling_split = report.tasks, report.sampling_s, report.sampling_split
        return groups, episodes

    async def _request(self, step: int) -> None:
        """Request as many groups as may be open."""
        if specs := self._open.request(step):
            await self._gathering.request(specs)
            self._show_progress(step)

    async def _gather(self, step: int, wait_s: float = MAX_WAIT_S) -> None:
        """Take in groups that have finished; wait for one if there is none."""
        for spec, found in await self._gathering.next(wait_s):
            group = self._open.groups[spec.id]
            group.episodes, group.selections = await self._selector.select(found, step)
            if spec.id not in self._earlier:
                self._unchecked.append(group.episodes)
            self._show_progress(step)

    def _check_streak(self) -> None:
        """Raise if too many tasks have failed in a row. Groups that finish first may all have failed: wait for more."""
        self._health.check_streak([episode for episodes in self._unchecked for episode in episodes])
        self._unchecked.clear()

    def _show_progress(self, step: int) -> None:
        groups = self._open.groups.values()
        done = sum(group.spec.size for group in groups if group.episodes is not None)
        self._reports.progress(step, done, sum(group.spec.size for group in groups), "rollouts")
