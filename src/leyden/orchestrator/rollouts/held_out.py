"""Evaluates the policy during a training: on held-out tasks, which choose the best step, and once on test tasks."""

from collections.abc import Sequence

from msgspec.structs import replace

from leyden.config import Config
from leyden.episodes import Episode
from leyden.estimates import TaskRewards, compare
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.health.health import Health
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.evaluation import EvaluationResult, evaluate, measure
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.records import Purpose, Task


class Evaluations:
    """The evaluations of one training, which starts from a state."""

    def __init__(
        self,
        config: Config,
        tasks: Tasks,
        collector: RolloutCollector,
        health: Health,
        reports: Reports,
        state: TrainerState,
    ) -> None:
        self._config, self._tasks, self._collector = config, tasks, collector
        self._health, self._reports = health, reports
        self._rewards_before: TaskRewards | None = None
        self.best_step, self.best_reward = state.best_step, state.best_reward
        """Step with the highest held-out reward; of equal ones the later."""

    async def measure(self, step: int) -> EvaluationResult | None:
        """Evaluate the policy after a step on the held-out tasks; None if there are none."""
        if not self._tasks.held_out:
            return None
        requested_before = await self._collector.find(f"eval-{step}-{self._tasks.held_out[0].id}")
        measured, episodes = await self._evaluate("eval", step, self._tasks.held_out, "held-out rollouts")
        when = f"evaluation after step {step}" if step else "evaluation before training"
        self._reports.warn(self._health.add_rollouts(when, episodes))
        if not requested_before:  # otherwise failures may be those that have ended the run already
            self._health.check_streak(episodes)
        if step == 0:
            self._health.find_collapse(0, measured)
        else:
            measured = replace(measured, change=compare(await self._read_rewards_before(), measured.rewards))
        if measured.reward is not None and (self.best_reward is None or measured.reward >= self.best_reward):
            self.best_step, self.best_reward = step, measured.reward
        await self._reports.measured(step, measured, episodes)
        return measured

    @property
    def has_test(self) -> bool:
        """Whether there are test tasks that were not evaluated yet."""
        return bool(self._tasks.test)

    async def test(self, step: int) -> None:
        """Evaluate the weights of a step, which are served, on the test tasks."""
        measured, _ = await self._evaluate("test", step, self._tasks.test, "test rollouts", Purpose.TEST)
        await self._reports.tested(step, measured)

    async def _read_rewards_before(self) -> TaskRewards:
        """Return the rewards of the evaluation before the first step, which an earlier process may have made."""
        if self._rewards_before is None:
            found = [await self._collector.find(f"eval-0-{task.id}") for task in self._tasks.held_out]
            finished = [one for episodes in found for one in episodes if one.attempt.outcome is not None]
            measured = measure(finished, self._config.rollout.failure_reward, self._config.evaluation.success)
            self._rewards_before = measured.rewards
        return self._rewards_before

    async def _evaluate(
        self, name: str, step: int, tasks: Sequence[Task], what: str, purpose: Purpose = Purpose.EVAL
    ) -> tuple[EvaluationResult, list[Episode]]:
        def progress(done: int, total: int) -> None:
            self._reports.progress(step, done, total, what)

        return await evaluate(self._collector, f"{name}-{step}", tasks, self._config, progress, step, purpose)
