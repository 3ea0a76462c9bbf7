"""Collects the groups of a step: requests them, rewards and selects their rollouts, and replaces dropped groups."""

import time
from collections.abc import Sequence

from leyden.api.wire import GroupSpec
from leyden.config import Config
from leyden.episodes import Episode
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.samples import Groups, SelectedRollout, select_rollouts
from leyden.orchestrator.health.health import Health
from leyden.orchestrator.health.shared_weights import shared_weights
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.orchestrator.rollouts.source import GroupSource
from leyden.orchestrator.rollouts.time_split import split_sampling
from leyden.outcomes import Ending

_MAX_TRIES = 3
"""How often a step requests groups, the first time included, before it continues without those that were dropped."""


class StepRollouts:
    """Collects the rollouts of steps."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        source: GroupSource,
        collector: RolloutCollector,
        health: Health,
        reports: Reports,
    ) -> None:
        self._config, self._algorithm, self._source = config, algorithm, source
        self._collector, self._health, self._reports = collector, health, reports

    async def collect(self, report: StepReport, version: int) -> tuple[Groups, list[Episode]]:
        """Collect the groups of a step in the order of their positions; none if there is nothing to learn from.

        Also return every episode of the step, those of dropped groups included. `version` is the newest one.
        """
        started, times = time.monotonic(), await self._collector.call_times()
        kept: dict[str, list[SelectedRollout]] = {}
        requested: list[GroupSpec] = []
        episodes: list[Episode] = []
        training, tries = self._config.training, 0
        # While no rollout of the step has succeeded it goes on: `FailureStreak` ends a run whose agent always fails.
        while (missing := training.tasks_per_step - len(kept)) and (
            tries < _MAX_TRIES or not (kept or any(map(_succeeded, episodes)))
        ):
            specs = self._source.take(missing, report.step)
            requested += specs
            episodes += await self._request(specs, kept, report, version)
            tries += 1
            if report.step == tries == 1:
                self._reports.warn(shared_weights(episodes, training.roles, self._config.policy))
        report.sampling_s = time.monotonic() - started
        calls = (await self._collector.call_times()).since(times)
        report.sampling_split = split_sampling(report.sampling_s, episodes, calls, report.started)
        return [kept[spec.id] for spec in requested if spec.id in kept], episodes

    async def _request(
        self, specs: Sequence[GroupSpec], kept: dict[str, list[SelectedRollout]], report: StepReport, version: int
    ) -> list[Episode]:
        """Request groups; add those that are not dropped to `kept`, and return all episodes."""
        step, signals = report.step, self._algorithm.signals
        total = sum(spec.size for spec in specs)
        done: list[Episode] = []
        self._reports.progress(step, 0, total, "rollouts")
        async for spec, found in self._collector.gather(specs):
            episodes = await reward_automatically(self._collector.remote, found, signals, step)
            done += episodes
            self._reports.progress(step, len(done), total, "rollouts")
            group = select_rollouts(episodes, self._algorithm.sample_filter, report.accounting)
            if group is not None:
                kept[spec.id] = group
        report.add_episodes(done, version, self._config, signals.enabled)
        self._reports.warn(self._health.add_rollouts(f"step {step}", done))
        self._health.check_streak(done)
        return done


def _succeeded(episode: Episode) -> bool:
    outcome = episode.attempt.outcome
    return outcome is not None and outcome.ending is Ending.SUCCEEDED
