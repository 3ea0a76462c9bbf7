"""The training loop: collects the rollouts of a step, updates the policy, evaluates and saves checkpoints."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

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

    def __init__(self, config: Config, pipeline: Pipeline, step: int) -> None:
        """`step` is the last one that was trained."""
        self._config, self._parts, self._step = config, pipeline, step
        self.waits_for_evaluation = False
        """Whether `stop` is followed at once, because nothing is to be saved."""

    async def run(self, stop: asyncio.Event) -> TrainerState:
        """Train until the last step, or until `stop` is set; the current step is finished and saved.

        An evaluation before the first step or after the last one is abandoned.
        """
        config, parts = self._config, self._parts
        time_left, last = TimeLeft(config.training.time_limit_s), config.training.steps
        if self._step == 0:
            await self._unless_stopped(stop, parts.evaluations.measure(0))
        while self._step < last and not stop.is_set():
            time_left.start_step()
            report = await self._train(self._step + 1)
            if time_left.is_over:
                last = report.step
            if _due(config.evaluation.every, report.step, last):
                started = time.monotonic()
                report.held_out = await parts.evaluations.measure(report.step)
                report.evaluation_s = time.monotonic() - started
            # before the checkpoint, so that every saved step has been reported
            await parts.reports.step(report, time_left.end_step(last - report.step))
            for message in parts.health.find_collapse(report):
                kept = parts.saver.keep_best(parts.evaluations.best_step)
                parts.reports.warn(f"step {report.step}: {message}. {kept}.")
            for message in parts.health.find_warnings(report):
                parts.reports.warn(message)
            best = parts.evaluations.best_step == report.step
            if best or stop.is_set() or _due(config.checkpoints.every, report.step, last):
                await parts.saver.save(self._state)
        if self._step == last and parts.evaluations.has_test:
            await self._unless_stopped(stop, self._evaluate_best())
        return self._state

    async def _train(self, step: int) -> StepReport:
        """Make a step. Only its last update is published: nothing is sampled in between."""
        parts, policy, started = self._parts, self._config.policy, time.monotonic()
        report = StepReport(step, [], StepAccounting(), started=time.time())
        groups, episodes = await parts.rollouts.collect(report, parts.publisher.version)
        if not groups:
            await parts.credits.record(step, report.accounting)
            raise TrainingError(nothing_to_learn(step, report.accounting, episodes))
        report.learning_rate = await parts.learner.start_step(policy, step)
        await parts.publisher.make_room()
        report.kl_start = await parts.divergence.measure(groups, step)
        updates = await parts.updates.prepare(groups, report.accounting)
        await parts.credits.record(step, report.accounting)
        for update in updates:
            report.metrics.append(await parts.learner.accumulate(policy, update))
            await parts.publisher.update()
        if updates or parts.publisher.must_publish:
            report.publication = await parts.publisher.publish()
        report.training_s = time.monotonic() - started - report.sampling_s - report.publishing_s
        self._step = step
        return report

    async def _evaluate_best(self) -> None:
        """Evaluate the best weights, which may be those before training; the last if no step has a held-out reward."""
        best = self._parts.evaluations.best_step
        step = self._step if best is None else best
        if step != self._step:
            await self._parts.publisher.publish_checkpoint(step)
        await self._parts.evaluations.test(step)

    @property
    def _state(self) -> TrainerState:
        parts = self._parts
        return TrainerState(
            step=self._step,
            policy=self._config.policy,
            position=parts.source.position,
            version=parts.publisher.version,
            best_step=parts.evaluations.best_step,
            best_reward=parts.evaluations.best_reward,
            kept_step=parts.saver.kept_step,
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


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
