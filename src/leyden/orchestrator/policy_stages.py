"""The stages of a training that each policy has for itself, and the step that it makes with them.

Nothing of another policy enters them: the groups that `train` gets were selected by the policy's own calls and rewards.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.client import Remote
from leyden.config import Config
from leyden.episodes import Episode
from leyden.learner.protocol import Learner, TrainerState
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.samples import Groups, StepAccounting, leave_out
from leyden.orchestrator.early_gradient import EarlyGradient
from leyden.orchestrator.health.divergence import Divergence
from leyden.orchestrator.health.health import PolicyHealth
from leyden.orchestrator.health.roles import shared_weights
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.publisher import Publisher
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.saving import Saver
from leyden.orchestrator.updates import UpdateBuilder
from leyden.records import StepCredits

_CREDITS_PER_REQUEST = 10_000
"""Calls whose credits are recorded in one transaction."""


class PolicyStages(Struct, frozen=True):
    """What belongs to one policy of a training."""

    config: Config
    """That of a run with this policy alone."""
    algorithm: Algorithm
    remote: Remote
    learner: Learner
    publications: Publications
    divergence: Divergence
    updates: UpdateBuilder | EarlyGradient
    publisher: Publisher
    health: PolicyHealth
    reports: Reports
    saver: Saver
    label: str = ""
    """Its name before what is said of it, if there are several."""

    @property
    def early(self) -> EarlyGradient | None:
        """What computes its gradient while groups of the step run; None if that waits for all."""
        return self.updates if isinstance(self.updates, EarlyGradient) else None

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self.config.policy

    def new_report(self, step: int) -> StepReport:
        """Return the report of a step that begins."""
        overlaps = self.config.training.max_staleness > 0
        return StepReport(step, [], StepAccounting(), policy=self.name, started=time.time(), overlaps=overlaps)

    def add_episodes(self, report: StepReport, episodes: Sequence[Episode]) -> None:
        """Add the episodes of a step to its report."""
        report.add_episodes(episodes, self.publications, self.config, self.algorithm.signals.enabled)
        if (foreign := self.algorithm.sample_filter.foreign).names:
            report.own_rewards = foreign.final_rewards(episodes, self.config.rollout.failure_reward)
        if report.step == 1:
            self.reports.warn(shared_weights(episodes, self.config.training.roles, self.name))

    async def begin_step(self, report: StepReport) -> None:
        """Begin a step that trains this policy: gradients may be computed while its rollouts run."""
        report.learning_rate = await self.learner.start_step(self.name, report.step)

    async def train(self, report: StepReport, groups: Groups, before_change: Callable[[], Awaitable[None]]) -> None:
        """Train on the groups of a step; `before_change` is awaited before weights change. Publish the last update."""
        started = time.monotonic()
        await self.publisher.make_room()
        report.kl_start = await self.divergence.measure(groups, report.step, moved=self.publisher.version > 0)
        updates = await self.updates.prepare(groups, report.accounting)
        await self.record_credits(report)
        for update in updates:
            report.metrics.append(await self.learner.accumulate(self.name, update))
            waiting = time.monotonic()
            await before_change()
            report.waiting_s += time.monotonic() - waiting
            await self.publisher.update()
        if updates or self.publisher.must_publish:
            report.publication = await self.publisher.publish()
        report.training_s = time.monotonic() - started - report.waiting_s - report.publishing_s

    async def skip(self, report: StepReport, groups: Groups) -> None:
        """Leave the groups of a step out, because another policy is trained in it."""
        for group in groups:
            leave_out(group, "not its turn", report.accounting)
        await self.record_credits(report)

    async def record_credits(self, report: StepReport) -> None:
        """Record on the server what a step computed for each call; a repeated step overwrites what it recorded."""
        credits = report.accounting.credits
        for start in range(0, len(credits), _CREDITS_PER_REQUEST):
            some = tuple(credits[start : start + _CREDITS_PER_REQUEST])
            await self.remote.record_credits(self.config.run, StepCredits(report.step, some, self.name))

    def state(self, run: TrainerState) -> TrainerState:
        """Return the state of this policy after a step, from what all policies of the run have in common."""
        versions = self.publications.versions
        return replace(run, policy=self.name, version=self.publisher.version, published=versions)
