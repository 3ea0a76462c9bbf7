"""The training loop: collects the rollouts of a step, updates the policy, evaluates and saves checkpoints.

With `training.max_staleness` above 0 agents go on meanwhile, and a step is evaluated and saved while the next one is
collected and its gradient computed: weights change when the evaluation is done, so it is of one version.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from leyden.config import Config
from leyden.learner.errors import TrainingError
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.health.nothing_to_learn import nothing_to_learn
from leyden.orchestrator.pipeline import Pipeline
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.report.time_left import TimeLeft


class Trainer:
    """Trains the policy of one run."""

    def __init__(self, config: Config, pipeline: Pipeline, state: TrainerState) -> None:
        """`state` is that after the last step that was trained."""
        self._config, self._parts, self._trained = config, pipeline, state
        self._time_left = TimeLeft(config.training.time_limit_s)
        self._last = config.training.steps
        self._closing: asyncio.Task[None] | None = None
        """Evaluates, reports and saves the step before; awaited before the weights change again."""
        self.waits_for_evaluation = False
        """Whether `stop` is followed at once, because nothing is to be saved."""

    async def run(self, stop: asyncio.Event) -> TrainerState:
        """Train until the last step, or until `stop` is set; the current step is finished and saved.

        An evaluation before the first step or after the last one is abandoned.
        """
        parts = self._parts
        if self._trained.step == 0:
            await self._unless_stopped(stop, parts.evaluations.measure(0))
        self._time_left.start()
        try:
            while self._trained.step < self._last and not stop.is_set():
                report = await self._beside_closing(self._train(self._trained.step + 1))
                if self._time_left.is_over:
                    self._last = report.step
                await self._closed()
                self._closing = asyncio.create_task(self._close(report, self._trained, stop))
                if not self._config.training.max_staleness:
                    await self._closed()
            await self._closed()
            if stop.is_set() and (parts.saver.newest or 0) != self._trained.step:
                await parts.saver.save(self._state(self._trained))
            await parts.saver.finish()
        finally:
            await _cancel(self._closing)
            parts.saver.cancel()
        if self._trained.step == self._last and parts.evaluations.has_test:
            await self._unless_stopped(stop, self._evaluate_best())
        return self._state(self._trained)

    async def _train(self, step: int) -> StepReport:
        """Make a step. Only its last update is published."""
        parts, policy, started = self._parts, self._config.policy, time.monotonic()
        overlaps = self._config.training.max_staleness > 0
        report = StepReport(step, [], StepAccounting(), started=time.time(), overlaps=overlaps)
        groups, episodes = await parts.rollouts.collect(report)
        if not groups and not report.accounting.groups_flat:
            await parts.credits.record(step, report.accounting)
            raise TrainingError(nothing_to_learn(step, report.accounting, episodes))
        report.learning_rate = await parts.learner.start_step(policy, step)
        await parts.publisher.make_room()
        report.kl_start = await parts.divergence.measure(groups, step, moved=parts.publisher.version > 0)
        updates = await parts.updates.prepare(groups, report.accounting)
        await parts.credits.record(step, report.accounting)
        for update in updates:
            report.metrics.append(await parts.learner.accumulate(policy, update))
            waiting = time.monotonic()
            await self._closed()
            report.waiting_s += time.monotonic() - waiting
            await parts.publisher.update()
        if updates or parts.publisher.must_publish:
            report.publication = await parts.publisher.publish()
        others = report.sampling_s + report.waiting_s + report.publishing_s
        report.training_s = time.monotonic() - started - others
        self._trained = TrainerState(
            step=step,
            policy=policy,
            position=parts.source.position,
            version=parts.publisher.version,
            published=parts.publications.versions,
            open_groups=parts.rollouts.open_groups,
            task_record=parts.source.record,
        )
        return report

    async def _close(self, report: StepReport, trained: TrainerState, stop: asyncio.Event) -> None:
        """Evaluate, report and save a step whose weights are published."""
        config, parts = self._config, self._parts
        parts.saver.check()
        if _due(config.evaluation.every, report.step, self._last):
            started = time.monotonic()
            report.held_out = await parts.evaluations.measure(report.step)
            report.evaluation_s = time.monotonic() - started
        # before the checkpoint, so that every saved step has been reported
        await parts.reports.step(report, self._time_left.end_step(self._last - report.step))
        for message in parts.health.find_collapse(report):
            kept = parts.saver.keep_best(parts.evaluations.best_step)
            parts.reports.warn(f"step {report.step}: {message}. {kept}.")
        for message in parts.health.find_warnings(report):
            parts.reports.warn(message)
        best = parts.evaluations.best_step == report.step
        if best or stop.is_set() or _due(config.checkpoints.every, report.step, self._last):
            await parts.saver.save(self._state(trained))

    async def _closed(self) -> None:
        """Wait until the step before is evaluated, reported and saved."""
        if (closing := self._closing) is not None:
            await asyncio.wait({closing})  # to cancel who waits does not cancel it
            self._closing = None
            closing.result()

    async def _beside_closing(self, train: Coroutine[Any, Any, StepReport]) -> StepReport:
        """Make a step while the one before is closed: an error of that ends it, and after an error that is closed."""
        training = asyncio.create_task(train)
        try:
            closing = {self._closing} if self._closing is not None else set()
            await asyncio.wait({training, *closing}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await self._closed()
            return await training
        except Exception:
            await self._closed()
            raise
        finally:
            await _cancel(training)

    async def _evaluate_best(self) -> None:
        """Evaluate the best weights, which may be those before training; the last if no step has a held-out reward."""
        best = self._parts.evaluations.best_step
        step = self._trained.step if best is None else best
        if step != self._trained.step:
            await self._parts.publisher.publish_checkpoint(step)
        await self._parts.evaluations.test(step)

    def _state(self, trained: TrainerState) -> TrainerState:
        """Return the state after a step with what is known of the best one."""
        evaluations = self._parts.evaluations
        return replace(
            trained,
            best_step=evaluations.best_step,
            best_reward=evaluations.best_reward,
            kept_step=self._parts.saver.kept_step,
        )

    async def _unless_stopped(self, stop: asyncio.Event, evaluation: Coroutine[Any, Any, object]) -> None:
        """Await an evaluation that the next start repeats with the rollouts in the store; abandon it at `stop`."""
        self.waits_for_evaluation = True
        evaluating, stopping = asyncio.create_task(evaluation), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({evaluating, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if evaluating.done():
                evaluating.result()
        finally:
            self.waits_for_evaluation = False
            for task in (evaluating, stopping):
                task.cancel()
            await asyncio.wait({evaluating, stopping})


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task unless it is done, and wait for its end; another error ends the run already."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # so that it does not count as unseen


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
