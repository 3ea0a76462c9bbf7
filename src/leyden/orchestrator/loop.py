"""The training loop: collects the rollouts of a step, updates the policies, evaluates and saves checkpoints.

With `training.max_staleness` above 0 agents go on meanwhile, and a step is evaluated and saved while the next one is
collected and its gradient computed: weights change when the evaluation is done, so it is of one version.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from leyden.background import running
from leyden.config import Config
from leyden.learner.errors import TrainingError
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.health.nothing_to_learn import nothing_to_learn
from leyden.orchestrator.pipeline import Pipeline
from leyden.orchestrator.policy_stages import PolicyStages
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.report.time_left import TimeLeft
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.process.usage import ResourceMeter

Reports = Mapping[str, StepReport]
States = Mapping[str, TrainerState]
"""By policy."""


class Trainer:
    """Trains the policies of one run."""

    def __init__(self, config: Config, pipeline: Pipeline, states: States) -> None:
        """`states` are those of the policies after the last step that was trained."""
        self._config, self._parts, self._trained = config, pipeline, states
        self._step = next(iter(states.values())).step
        """The last one that was trained."""
        self._time_left = TimeLeft(config.training.time_limit_s)
        self._last = config.training.steps
        self._meter = ResourceMeter()
        self._closing: asyncio.Task[None] | None = None
        """Evaluates, reports and saves the step before; awaited before the weights change again."""
        self.waits_for_evaluation = False
        """Whether `stop` is followed at once, because nothing is to be saved."""

    async def run(self, stop: asyncio.Event) -> dict[str, TrainerState]:
        """Train until the last step, or until `stop` is set; the current step is finished and saved.

        An evaluation before the first step or after the last one is abandoned. Returns the states of the policies.
        """
        parts = self._parts
        if self._step == 0:
            await self._unless_stopped(stop, self._measure(0))
        self._time_left.start()
        await parts.rollouts.resume()
        try:
            while self._step < self._last and not stop.is_set():
                reports = await self._beside_closing(self._train(self._step + 1))
                if self._time_left.is_over:
                    self._last = self._step
                await self._closed()
                self._closing = asyncio.create_task(self._close(self._step, reports, self._trained, stop))
                if not self._config.training.max_staleness:
                    await self._closed()
            await self._closed()
            if stop.is_set() and (parts.policies[0].saver.newest or 0) != self._step:
                await self._save(self._trained)
            for one in parts.policies:
                await one.saver.finish()
        finally:
            await _cancel(self._closing)
            for one in parts.policies:
                one.saver.cancel()
                if one.early is not None:
                    await one.early.close()
        if self._step == self._last and parts.evaluations.has_test:
            await self._unless_stopped(stop, self._evaluate_best())
        return {one.name: self._state(self._trained[one.name], one) for one in parts.policies}

    async def _train(self, step: int) -> Reports:
        """Make a step. Of each policy only the last update is published."""
        parts = self._parts
        reports = {one.name: one.new_report(step) for one in parts.policies}
        for opponent in parts.opponents:
            for one in parts.policies:
                await one.saver.finish()
            await opponent.begin_step(step)
        for one in self._turn(step):
            await one.begin_step(reports[one.name])
        groups, episodes = await parts.rollouts.collect(reports)
        for opponent in parts.opponents:
            opponent.add_results(episodes)
        for one in parts.policies:
            one.add_episodes(reports[one.name], episodes)
        if not any(groups.values()) and not any(report.accounting.groups_flat for report in reports.values()):
            for one in parts.policies:
                await one.record_credits(reports[one.name])
            raise TrainingError(nothing_to_learn(step, reports[parts.policies[0].name].accounting, episodes))
        for one in parts.policies:
            if one in self._turn(step):
                await one.train(reports[one.name], groups[one.name], self._closed)
            else:
                await one.skip(reports[one.name], groups[one.name])
        if len(parts.policies) > 1:
            parts.publications.add(step)
        run = parts.rollouts.state(step)
        self._trained, self._step = {one.name: one.state(run) for one in parts.policies}, step
        return reports

    def _turn(self, step: int) -> tuple[PolicyStages, ...]:
        """Return the policies that are trained in a step: all, or the one whose turn it is."""
        every, policies = self._config.training.alternate, self._parts.policies
        return policies if not every else (policies[(step - 1) // every % len(policies)],)

    async def _close(self, step: int, reports: Reports, trained: States, stop: asyncio.Event) -> None:
        """Evaluate, report and save a step whose weights are published."""
        config, parts = self._config, self._parts
        held_out = None
        for one in parts.policies:
            one.saver.check()
        if step == self._last or _due(config.evaluation.every, step):
            started = time.monotonic()
            held_out = await self._measure(step)
            for report in reports.values():
                report.held_out, report.evaluation_s = held_out, time.monotonic() - started
        use = await asyncio.to_thread(self._meter.measure)
        for report in reports.values():
            report.use = use
        # before the checkpoint, so that every saved step has been reported
        left_s = self._time_left.end_step(self._last - step)
        for one in parts.policies:
            await one.reports.step(reports[one.name], left_s)
        collapsed = [(one.label, one.health.find_collapse(reports[one.name])) for one in parts.policies]
        for label, message in (*collapsed, ("", parts.health.find_collapse(step, held_out))):
            if message is not None:
                kept, *_ = [one.saver.keep_best(parts.evaluations.best_step) for one in parts.policies]
                parts.reports.warn(f"step {step}: {label}{message}. {kept}.")
        for one in parts.policies:
            for warning in one.health.find_warnings(reports[one.name]):
                parts.reports.warn(f"step {step}: {one.label}{warning}.")
        regular = parts.evaluations.best_step == step or _due(config.checkpoints.every, step)
        if regular or stop.is_set() or step == self._last:
            await self._save(trained, regular)

    async def _save(self, trained: States, regular: bool = False) -> None:
        """Save a step of all policies once all have saved the one before: there is always a step that all of them have.

        Opponents play only `regular` ones: those that a run has wherever it is interrupted.
        """
        for one in self._parts.policies:
            await one.saver.finish()
        for opponent in self._parts.opponents if regular else ():
            opponent.add_version(self._step)
        for one in self._parts.policies:
            await one.saver.save(self._state(trained[one.name], one))

    async def _closed(self) -> None:
        """Wait until the step before is evaluated, reported and saved."""
        if (closing := self._closing) is not None:
            await asyncio.wait({closing})  # to cancel who waits does not cancel it
            self._closing = None
            closing.result()

    async def _beside_closing(self, train: Coroutine[Any, Any, Reports]) -> Reports:
        """Make a step while the one before is closed. An error of closing ends the step, but not vice versa."""
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
        step = self._step if best is None else best
        for one in self._parts.policies if step != self._step else ():
            await one.publisher.publish_checkpoint(step)
        await self._begin_evaluation()
        await self._parts.evaluations.test(step)

    async def _measure(self, step: int) -> EvaluationResult | None:
        """Evaluate the policies after a step on the held-out tasks."""
        await self._begin_evaluation()
        return await self._parts.evaluations.measure(step)

    async def _begin_evaluation(self) -> None:
        for opponent in self._parts.opponents:
            await opponent.begin_evaluation()

    def _state(self, trained: TrainerState, policy: PolicyStages) -> TrainerState:
        """Return the state after a step with what is known of the best one."""
        evaluations = self._parts.evaluations
        return replace(
            trained,
            best_step=evaluations.best_step,
            best_reward=evaluations.best_reward,
            kept_step=policy.saver.kept_step,
            pools={one.name: one.pool for one in self._parts.opponents},
        )

    async def _unless_stopped(self, stop: asyncio.Event, evaluation: Coroutine[Any, Any, object]) -> None:
        """Await an evaluation that the next start repeats with the rollouts in the store; abandon it at `stop`."""
        self.waits_for_evaluation = True
        try:
            async with running(evaluation, stop.wait()) as (evaluating, stopping):
                await asyncio.wait({evaluating, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if evaluating.done():
                    evaluating.result()
        finally:
            self.waits_for_evaluation = False


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task unless it is done, and wait for its end; another error ends the run already."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # so that it does not count as unseen


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
