"""Collects the groups of a step: requests groups, rewards and selects their rollouts, and replaces useless groups."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.config import Config
from leyden.config.policies import policy_configs, role_routes
from leyden.episodes import Episode
from leyden.learner.protocol import OpenGroup, TrainerState
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.advantages import teaches
from leyden.orchestrator.credit.samples import (
    Groups,
    SelectedRollout,
    StepAccounting,
    leave_out,
    select_rollouts,
)
from leyden.orchestrator.health.health import Health
from leyden.orchestrator.health.routed_roles import check_roles
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.branching import Branching
from leyden.orchestrator.rollouts.collector import MAX_WAIT_S, Gathering, RolloutCollector
from leyden.orchestrator.rollouts.open_groups import OpenGroups, RequestedGroup, Selection
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.orchestrator.rollouts.source import GroupSource
from leyden.orchestrator.rollouts.taken_groups import TakenGroups
from leyden.orchestrator.rollouts.time_split import split_sampling


class StepRollouts:
    """Collects the rollouts of steps."""

    def __init__(
        self,
        config: Config,
        algorithms: Mapping[str, Algorithm],
        source: GroupSource,
        collector: RolloutCollector,
        health: Health,
        reports: Reports,
        publications: Publications,
        taken: TakenGroups,
        state: TrainerState,
    ) -> None:
        """`algorithms` are those of the policies that are trained. `publications` say how old a group is.

        `state` is that of a run that is resumed.
        """
        self._config, self._algorithms, self._source = config, algorithms, source
        self._signals = next(iter(algorithms.values())).signals  # they are those of the run
        self._role_routes = role_routes(config)
        self._collector, self._health, self._reports = collector, health, reports
        self._publications, self._gathering = publications, Gathering(collector, source.drawn)
        self._open, self._taken = OpenGroups(config.training, publications), taken
        self._resumed = state.open_groups
        self._branching = {
            name: Branching(policy_configs(config)[name], algorithm.branch, state.branch_debt)
            for name, algorithm in algorithms.items()
            if algorithm.branch is not None
        }
        """By policy; one at the most."""
        self._unchecked: list[Sequence[Episode]] = []
        """Of groups that have finished since failures were last counted."""

    @property
    def open_groups(self) -> tuple[OpenGroup, ...]:
        """The groups that were requested and not trained on yet, oldest first."""
        return self._open.state

    @property
    def branch_debt(self) -> float:
        """The tokens that were sampled for continuations beyond their budget, which the next step saves."""
        return sum(branching.debt for branching in self._branching.values())

    async def collect(self, reports: Mapping[str, StepReport]) -> tuple[dict[str, Groups], list[Episode]]:
        """Collect the groups of a step in the order of their positions.

        Returns for each policy those that it may learn from, and every episode of the step, those of dropped groups
        included. `reports` are those of the policies.
        """
        report = next(iter(reports.values()))
        started, times = time.monotonic(), await self._collector.call_times()
        if self._gathering.waiting:
            await self._gather(report.step, wait_s=0)
        self._open.begin_step()
        await self._request(report.step, [*self._resumed])
        self._resumed = ()
        while (taken := self._open.take(self._taken.of(report.step))) is None:
            await self._gather(report.step)
            await self._request(report.step)
            if not self._gathering.waiting or len(self._unchecked) >= self._config.training.tasks_per_step:
                self._check_streak()
        self._check_streak()
        await self._taken.add(report.step, [group.open.position for group in taken])
        episodes = [episode for group in taken for episode in group.episodes or ()]
        report.tasks = self._source.add_step(taken, report.step, self._config.rollout.failure_reward)
        for group in taken:
            for name, selection in group.selections.items():
                reports[name].accounting.add(selection.accounting)
        groups: dict[str, Groups] = {
            name: [one.rollouts for group in taken if (one := group.selections[name]).rollouts is not None]
            for name in reports
        }
        for name, branching in self._branching.items():
            groups[name], continuations = await self._continue(branching, taken, reports[name], name)
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

    async def _continue(
        self, branching: Branching, taken: Sequence[RequestedGroup], report: StepReport, policy: str
    ) -> tuple[Groups, list[Episode]]:
        """Continue rollouts from inside; return all groups of the step, and the episodes of continuations."""
        selected_G = [one for group in taken if (one := group.selections[policy].rollouts) is not None]
        sampled = [episode for group in taken for episode in group.episodes or ()]
        specs, found = branching.plan(selected_G, sampled, report.step), dict[str, list[Episode]]()
        async for spec, episodes in self._collector.gather(specs):
            found[spec.id] = await reward_automatically(self._collector.remote, episodes, self._signals, report.step)
            self._reports.progress(report.step, len(found), len(specs), "groups of continuations")
        sample_filter = replace(self._algorithms[policy].sample_filter, min_group=2)
        groups: list[Sequence[SelectedRollout]] = []
        for group in selected_G:
            attempts = {rollout.episode.attempt.id for rollout in group}
            own = [found[spec.id] for spec in specs if spec.origin is not None and spec.origin.attempt in attempts]
            selected = [select_rollouts(one, sample_filter, report.accounting) for one in own]
            groups += [group, *(one for one in selected if one is not None)]
        continuations = [episode for spec in specs for episode in found[spec.id]]
        branching.add_step(sampled, continuations)
        return groups, continuations

    async def _request(self, step: int, resumed: Iterable[OpenGroup] = ()) -> None:
        """Request as many groups as may be open, those of an earlier process first, and all that the step repeats."""
        training, groups, specs = self._config.training, self._open.groups, list[GroupSpec]()

        def add(group: RequestedGroup) -> None:
            groups[group.spec.id] = group
            specs.append(group.spec)

        for one in resumed:
            add(self._source.again(one))
        repeated = max(self._taken.of(step), default=-1) + 1 - self._source.position
        for _ in range(max(self._open.room(training.steps - step + 1), repeated)):
            meant_for = step + sum(group.teaches for group in groups.values()) // training.tasks_per_step
            running = {group.spec.task.id for group in groups.values()}
            add(self._source.take(meant_for, self._publications.newest, running))
        if specs:
            for found in await self._gathering.request(specs):
                self._source.adopt(groups[found.id], found)
            self._show_progress(step)

    async def _gather(self, step: int, wait_s: float = MAX_WAIT_S) -> None:
        """Take in groups that have finished; wait for one if there is none."""
        for spec, found in await self._gathering.next(wait_s):
            await self._finish(self._open.groups[spec.id], found, step)

    async def _finish(self, group: RequestedGroup, found: Sequence[Episode], step: int) -> None:
        """Reward the rollouts of a group that has finished, and select those of each policy."""
        episodes = await reward_automatically(self._collector.remote, found, self._signals, step)
        group.selections = {name: await self._select(episodes, one) for name, one in self._algorithms.items()}
        group.episodes = episodes
        self._unchecked.append(group.episodes)
        self._show_progress(step)

    async def _select(self, episodes: Sequence[Episode], algorithm: Algorithm) -> Selection:
        accounting = StepAccounting()
        selected = select_rollouts(episodes, algorithm.sample_filter, accounting)
        if selected is not None and await self._is_replaced(selected, algorithm):
            leave_out(selected, "flat group", accounting)
            accounting.groups_flat += 1
            selected = None
        return Selection(selected, accounting)

    def _check_streak(self) -> None:
        """Raise if too many tasks have failed in a row. Groups that finish first may all have failed: wait for more."""
        self._health.check_streak([episode for episodes in self._unchecked for episode in episodes])
        self._unchecked.clear()

    async def _is_replaced(self, group: Sequence[SelectedRollout], algorithm: Algorithm) -> bool:
        if self._config.training.flat_groups == "keep":
            return False
        return not await asyncio.to_thread(teaches, group, algorithm.advantage_estimator)

    def _show_progress(self, step: int) -> None:
        groups = self._open.groups.values()
        done = sum(group.spec.size for group in groups if group.episodes is not None)
        self._reports.progress(step, done, sum(group.spec.size for group in groups), "rollouts")
