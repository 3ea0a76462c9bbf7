"""Continues rollouts of a step from points inside them, to estimate the values of the states there.

Rollouts are continued in a random order, as long as the tokens that this probably takes are within the budget of the
step. What a rollout will take is estimated from the other rollouts only: whether it is continued depends on nothing
that it did. What a step samples beyond its budget is taken from that of the next.
"""

from collections.abc import Sequence
from functools import partial
from random import Random

from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.config import Config
from leyden.episodes import Episode
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.samples import Groups, SelectedRollout, select_rollouts
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.evaluation import HIGHEST_PRIORITY
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.records import Origin
from leyden.rl.branch import Point
from leyden.user_code.bridge import call_in_thread


class Branching:
    """Chooses the continuations of steps."""

    def __init__(
        self, config: Config, algorithm: Algorithm, collector: RolloutCollector, reports: Reports, debt: float
    ) -> None:
        """`config` and `algorithm` are the policy's. `debt` is what earlier steps have sampled beyond their budgets."""
        self._config, self._algorithm, self._collector, self._reports = config, algorithm, collector, reports
        self.debt = debt
        """In tokens; the next step saves them."""

    async def extend(
        self, groups: Groups, sampled: Sequence[Episode], report: StepReport
    ) -> tuple[Groups, list[Episode]]:
        """Continue rollouts of a step; return its groups with those of continuations, and the episodes of these.

        `sampled` are all episodes of the step.
        """
        specs: list[GroupSpec] = await call_in_thread(partial(self.plan, groups, sampled, report.step))
        found = dict[str, list[Episode]]()
        async for spec, episodes in self._collector.gather(specs):
            signals = self._algorithm.signals
            found[spec.id] = await reward_automatically(self._collector.remote, episodes, signals, report.step)
            self._reports.progress(report.step, len(found), len(specs), "groups of continuations")
        sample_filter = replace(self._algorithm.sample_filter, min_group=2)
        extended: list[Sequence[SelectedRollout]] = []
        for group in groups:
            attempts = {rollout.episode.attempt.id for rollout in group}
            own = [found[spec.id] for spec in specs if spec.origin is not None and spec.origin.attempt in attempts]
            selected = [select_rollouts(one, sample_filter, report.accounting) for one in own]
            extended += [group, *(one for one in selected if one is not None)]
        continuations = [episode for spec in specs for episode in found[spec.id]]
        used = sum(self._sampled(episode) for episode in continuations)
        self.debt = max(0.0, self.debt + used - self._budget(sampled))
        return extended, continuations

    def plan(self, groups: Groups, sampled: Sequence[Episode], step: int) -> list[GroupSpec]:
        """Return the groups that continue rollouts of a step, in the order of these; `sampled` are all of the step."""
        named, seed = self._config.algorithm, f"{self._config.seed}/branching/{step}"
        priority = HIGHEST_PRIORITY if self._config.training.max_staleness else 0
        rollouts = [(group, rollout) for group in groups for rollout in group]
        order = Random(seed).sample(range(len(rollouts)), len(rollouts))
        budget, spent, specs_R = self._budget(sampled), self.debt, dict[int, list[GroupSpec]]()
        for number in order:
            group, rollout = rollouts[number]
            of_others = budget - self._budget([rollout.episode])  # or what follows a point would decide with
            if spent * (len(sampled) - 1) >= of_others * len(sampled):
                break
            points = self._points(rollout, group)
            # a continuation takes as many tokens as the rollout took from there, on average
            spent += named.continuations * sum(self._sampled(rollout.episode, calls) for calls in points)
            attempt = rollout.episode.attempt.id
            specs_R[number] = [
                GroupSpec(
                    f"{attempt}-{calls}",
                    rollout.episode.task,
                    named.continuations,
                    priority=priority,
                    step=step,
                    origin=Origin(attempt, calls),
                )
                for calls in points
            ]
        return [spec for number in sorted(specs_R) for spec in specs_R[number]]

    def _budget(self, sampled: Sequence[Episode]) -> float:
        return self._config.algorithm.branch_tokens * sum(self._sampled(episode) for episode in sampled)

    def _points(self, rollout: SelectedRollout, group: Sequence[SelectedRollout]) -> list[int]:
        """Return after how many calls a rollout is continued; not after its last call, where its return is known."""
        episode, named, branch = rollout.episode, self._config.algorithm, self._algorithm.branch
        assert branch is not None, "the credit of the algorithm is by continuations"
        others = tuple(other.episode.calls for other in group if other is not rollout)
        first = episode.rollout.origin.calls if episode.rollout.origin is not None else 0
        found: list[int] = []
        for calls in range(first + 1, min(len(episode.calls), episode.replayable + 1)):
            if episode.calls[calls].choice:  # the answers to one request are replayed together
                continue
            if len(found) < named.branch_points and branch(Point(episode.calls[:calls], others), named):
                found.append(calls)
        return found

    def _sampled(self, episode: Episode, start: int = 0) -> int:
        """Count the tokens that the policy sampled in a rollout after some calls."""
        own = (call for call in episode.calls[start:] if not episode.inherits(call))
        return sum(len(call.completion_ids) for call in own if call.policy == self._config.policy)
