"""The training loop: collects the rollouts of a step, updates the policy, evaluates and saves checkpoints."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from math import inf
from statistics import fmean
from typing import Any, TypeVar

from msgspec.structs import replace

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import GroupSpec
from leyden.backoff import Backoff
from leyden.config import Config
from leyden.engine.protocol import EngineBackend, Publication, WeightUpdate
from leyden.episodes import Episode
from leyden.estimates import TaskRewards, compare
from leyden.learner.checkpoint import Checkpoints, TrainerState, is_disk_full
from leyden.learner.errors import TrainingError
from leyden.learner.policy import CurrentWeights, Policy, PolicyUpdate
from leyden.learner.shared_weights import shared_weights
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting, select_rollouts
from leyden.orchestrator.health.collapse import CollapseDetector
from leyden.orchestrator.health.divergence import Divergence
from leyden.orchestrator.health.failures import NO_CALLS, FailureShare, FailureStreak
from leyden.orchestrator.health.mismatch import MismatchDetector
from leyden.orchestrator.health.position import PositionDetector
from leyden.orchestrator.health.standstill import StandstillDetector
from leyden.orchestrator.report.metrics_log import step_metrics
from leyden.orchestrator.report.observer import TrainingObserver
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.evaluation import EvaluationResult, evaluate, measure
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.orchestrator.rollouts.time_split import split_sampling
from leyden.orchestrator.updates import Update, prepare_updates
from leyden.outcomes import Ending
from leyden.records import Purpose, StepCredits, Task, Version

T = TypeVar("T")
_MAX_TRIES = 3
"""How often a group is requested, each time for another task, before a step continues without it."""
_HOW_ROLES_ARE_FOUND = (
    "A call has the role that it names, that of the span around it (LangChain, LangGraph, OpenAI Agents SDK: "
    "pip install 'leyden[trace]'), or one whose rule in `[roles]` matches its system prompt (docs/gateway.md, Roles)"
)
_ROOM_BACKOFF = Backoff(first_s=0.2, max_s=10.0)
_CREDITS_PER_REQUEST = 10_000
"""Calls whose credits are recorded in one transaction."""


class Trainer:
    """Trains the policy of one run, starting from its state."""

    def __init__(
        self,
        config: Config,
        tasks: Tasks,
        remote: Remote,
        algorithm: Algorithm,
        policy: Policy,
        engine: EngineBackend,
        checkpoints: Checkpoints,
        state: TrainerState,
        observers: Sequence[TrainingObserver],
        collapse: CollapseDetector,
        standstill: StandstillDetector,
        divergence: Divergence,
        changing_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`changing_weights` is entered from the hold of the calls until the new version is published."""
        self._config, self._tasks, self._remote = config, tasks, remote
        self._policy, self._engine, self._checkpoints = policy, engine, checkpoints
        self._observers, self._collapse, self._mismatch = observers, collapse, MismatchDetector()
        self._standstill, self._divergence = standstill, divergence
        self._collector = RolloutCollector(remote, config.run)
        self._compute = ThreadPoolExecutor(1, "trainer")
        self._algorithm, self._position = algorithm, PositionDetector(algorithm.position_advice)
        self._rewards_before: TaskRewards | None = None
        self._changing_weights, self._held = changing_weights, ExitStack()
        self._failures = FailureStreak(len({task.id for task in (*tasks.train, *tasks.held_out)}))
        self._failure_share = FailureShare(config.run)
        self.state = state
        self.waits_for_evaluation = False
        """Whether `stop` is followed at once, because nothing is to be saved."""

    async def run(self, stop: asyncio.Event) -> TrainerState:
        """Train until the last step, or until `stop` is set; the current step is finished and saved.

        An evaluation before the first step or after the last one is abandoned.
        """
        try:
            return await self._run(stop)
        finally:
            gc.unfreeze()

    async def _run(self, stop: asyncio.Event) -> TrainerState:
        training = self._config.training
        deadline = time.monotonic() + (training.time_limit_s or inf)
        last = training.steps
        durations: list[float] = []
        if self.state.step == 0:
            await self._unless_stopped(stop, self._measure(0))
        while self.state.step < last and not stop.is_set():
            started = time.monotonic()
            report = await self._step(self.state.step + 1)
            if time.monotonic() >= deadline:
                last = report.step
            if _due(self._config.evaluation.every, report.step, last):
                evaluating = time.monotonic()
                report.held_out = await self._measure(report.step)
                report.evaluation_s = time.monotonic() - evaluating
            if not durations:
                await self._on_thread(_freeze_objects)
            durations = [*durations[-9:], time.monotonic() - started]
            left_s = min(fmean(durations) * (last - report.step), max(0.0, deadline - time.monotonic()))
            for observer in self._observers:  # before the checkpoint, so that every saved step has been reported
                await self._when_there_is_room("the metrics", partial(observer.step, report, left_s))
            self._warn_of_collapse(report)
            self._warn_of_mismatch(report)
            self._warn_of_position(report)
            self._warn_of_standstill(report)
            best = self.state.best_step == report.step
            if best or stop.is_set() or _due(self._config.checkpoints.every, report.step, last):
                save = partial(self._on_thread, lambda: self._checkpoints.save(self._policy, self.state))
                await self._when_there_is_room("the checkpoint", save)
        if self.state.step == last and self._tasks.test:
            await self._unless_stopped(stop, self._measure_test())
        return self.state

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

    async def _step(self, step: int) -> StepReport:
        report = StepReport(step, [], StepAccounting(), started=time.time())
        self._policy.step = step
        started, times = time.monotonic(), await self._remote.get_call_times(self._config.run)
        groups, episodes = await self._collect(step, report)
        report.sampling_s = time.monotonic() - started
        calls = (await self._remote.get_call_times(self._config.run)).since(times)
        report.sampling_split = split_sampling(report.sampling_s, episodes, calls, report.started)
        report.learning_rate = self._policy.learning_rate
        training = self._config.training
        await self._make_room()
        report.kl_start = await self._on_thread(lambda: self._divergence.measure(groups, step))
        updates = await self._on_thread(
            lambda: prepare_updates(
                groups,
                training.updates_per_step,
                self._policy,
                self._algorithm,
                report.accounting,
                training.epochs,
            )
        )
        await self._record_credits(step, report.accounting)
        for number, update in enumerate(updates, start=1):
            await self._update(update, report, last=number == len(updates))
        if not updates and self._engine.sleeps_while_training:
            report.publication = await self._publish(CurrentWeights(self._policy), self.state.version)
        report.training_s = time.monotonic() - started - report.sampling_s - report.publishing_s
        self.state = replace(self.state, step=step)
        return report

    async def _make_room(self) -> None:
        """Let an engine that does not fit beside training sleep until the next publication."""
        if self._engine.sleeps_while_training:
            await self._hold_calls()
            await self._engine.sleep()

    async def _update(self, update: Update, report: StepReport, last: bool) -> None:
        """Make one update. Only the last of a step is published: nothing is sampled in between."""
        await self._make_room()
        objective = self._algorithm.objective
        metrics = await self._on_thread(lambda: self._policy.accumulate(update.samples, update.old_logprobs, objective))
        report.metrics.append(metrics)
        change, version = PolicyUpdate(self._policy, metrics.grad_norm), self.state.version + 1
        if last:
            report.publication = await self._publish(change, version)
        else:
            await self._hold_calls()
            await self._engine.apply(change, version)
        self.state = replace(self.state, version=version)

    async def _publish(self, update: WeightUpdate, version: int) -> Publication:
        with self._held:
            await self._hold_calls()
            publication = await self._engine.publish(update, version)
            await self._remote.publish_version(self._config.run, Version(self._config.policy, version))  # resumes them
        return publication

    async def _hold_calls(self) -> None:
        """Start no model call until the next publication."""
        self._held.enter_context(self._changing_weights())
        await self._remote.hold_calls(self._config.run, self._config.policy)

    async def _collect(self, step: int, report: StepReport) -> tuple[list[list[SelectedRollout]], list[Episode]]:
        """Collect the groups of a step, in the order of the requests; dropped groups are requested again.

        Also return every episode of the step, those of dropped groups included.
        """
        collected: list[Episode] = []
        wanted = [f"step-{step}-{number}" for number in range(self._config.training.tasks_per_step)]
        kept: dict[str, list[SelectedRollout]] = {}
        again, succeeded = 0, False
        # While no rollout of the step has succeeded it goes on: `FailureStreak` ends a run whose agent always fails.
        while len(kept) < len(wanted) and (again < _MAX_TRIES or not (kept or succeeded)):
            missing = {f"{name}-again-{again}" if again else name: name for name in wanted if name not in kept}
            specs = [self._spec(name, step) for name in missing]
            done: list[Episode] = []
            self._report_progress(step, 0, sum(spec.size for spec in specs), "rollouts")
            async for spec, found in self._collector.gather(specs):
                episodes = await reward_automatically(self._remote, found, self._algorithm.signals, step)
                done += episodes
                self._report_progress(step, len(done), sum(spec.size for spec in specs), "rollouts")
                if (group := select_rollouts(episodes, self._algorithm.sample_filter, report.accounting)) is not None:
                    kept[missing[spec.id]] = group
            collected += done
            report.add_episodes(done, self.state.version, self._config, self._algorithm.signals.enabled)
            self._add_failures(f"step {step}", done)
            succeeded = succeeded or any(_succeeded(episode) for episode in done)
            if step == 1 and again == 0:
                self._warn(shared_weights(done, self._config.training.roles, self._config.policy))
            again += 1
        if not kept:
            await self._record_credits(step, report.accounting)
            raise TrainingError(_nothing_to_learn(step, report.accounting, done))
        return [kept[name] for name in wanted if name in kept], collected

    async def _record_credits(self, step: int, accounting: StepAccounting) -> None:
        """Record on the server what the step computed for each call; a repeated step overwrites what it recorded."""
        for start in range(0, len(accounting.credits), _CREDITS_PER_REQUEST):
            some = tuple(accounting.credits[start : start + _CREDITS_PER_REQUEST])
            await self._remote.record_credits(self._config.run, StepCredits(step, some, self._config.policy))

    def _spec(self, name: str, step: int) -> GroupSpec:
        task = self._tasks.at(self.state.position)
        self.state = replace(self.state, position=self.state.position + 1)
        return GroupSpec(name, task, self._config.training.group_size, step=step)

    async def _measure(self, step: int) -> EvaluationResult | None:
        if not self._tasks.held_out:
            return None
        measured, episodes = await self._evaluate("eval", step, self._tasks.held_out, "held-out rollouts")
        self._add_failures(f"evaluation after step {step}" if step else "evaluation before training", episodes)
        if step == 0:
            self._collapse.add_held_out(0, measured.reward, measured.error)
        else:
            measured = replace(measured, change=compare(await self._read_rewards_before(), measured.rewards))
        best = self.state.best_reward
        if measured.reward is not None and (best is None or measured.reward >= best):  # of equal ones the later
            self.state = replace(self.state, best_step=step, best_reward=measured.reward)
        for observer in self._observers:
            await self._when_there_is_room("the metrics", partial(observer.measured, step, measured, episodes))
        return measured

    async def _read_rewards_before(self) -> TaskRewards:
        """Return the rewards of the evaluation before the first step, which an earlier process may have made."""
        if self._rewards_before is None:
            episodes: list[Episode] = []
            for task in self._tasks.held_out:
                try:
                    episodes += await self._remote.group_episodes(self._config.run, f"eval-0-{task.id}")
                except RemoteError as error:
                    if error.status != 404:  # it was not evaluated then
                        raise
            finished = [episode for episode in episodes if episode.attempt.outcome is not None]
            measured = measure(finished, self._config.rollout.failure_reward, self._config.evaluation.success)
            self._rewards_before = measured.rewards
        return self._rewards_before

    async def _measure_test(self) -> None:
        """Evaluate the best weights, which may be those before training; the last if no step has a held-out reward."""
        step = self.state.step if self.state.best_step is None else self.state.best_step
        if step != self.state.step:
            weights = await self._on_thread(lambda: self._checkpoints.weights_of(step, self._policy))
            await self._publish(weights, weights.version)
        measured, _ = await self._evaluate("test", step, self._tasks.test, "test rollouts", Purpose.TEST)
        for observer in self._observers:
            await self._when_there_is_room("the metrics", partial(observer.tested, step, measured))

    async def _evaluate(
        self, name: str, step: int, tasks: Sequence[Task], what: str, purpose: Purpose = Purpose.EVAL
    ) -> tuple[EvaluationResult, list[Episode]]:
        return await evaluate(
            self._collector,
            f"{name}-{step}",
            tasks,
            self._config,
            lambda done, total: self._report_progress(step, done, total, what),
            step,
            purpose,
        )

    def _add_failures(self, what: str, episodes: Sequence[Episode]) -> None:
        """Warn if most of these rollouts failed; raise if too many tasks have failed in a row."""
        message = self._failure_share.add(episodes)
        self._warn(None if message is None else f"{what}: {message}.")
        self._failures.add(episodes)

    def _warn_of_mismatch(self, report: StepReport) -> None:
        """Warn if the engine sampled from other probabilities than those of the policy at the start of the step."""
        message = self._mismatch.add_step(report.metrics[0].statistics) if report.metrics else None
        self._warn(None if message is None else f"step {report.step}: {message}.")

    def _warn_of_position(self, report: StepReport) -> None:
        """Warn if advantages depend on the position of calls in a rollout, and need not."""
        message = self._position.add_step(report.accounting.advantages)
        self._warn(None if message is None else f"step {report.step}: {message}.")

    def _warn_of_standstill(self, report: StepReport) -> None:
        """Warn if the policy or its rewards do not move."""
        message = self._standstill.add_step(report.step, step_metrics(report))
        self._warn(None if message is None else f"step {report.step}: {message}.")

    def _warn_of_collapse(self, report: StepReport) -> None:
        """Warn if the run collapses in this step, and keep the checkpoint that was best before."""
        entropies = [found for one in report.metrics if (found := one.statistics.get("entropy")) is not None]
        held_out = report.held_out
        for message in (
            self._collapse.add_entropy(fmean(entropies) if entropies else None),
            None if held_out is None else self._collapse.add_held_out(report.step, held_out.reward, held_out.error),
        ):
            if message is None:
                continue
            if self.state.best_step is not None:
                best = f"step {self.state.best_step} was the best on the held-out tasks"
                best += "; its checkpoint is kept" if self.state.best_step else ", that is the model before training"
            elif (newest := self._checkpoints.newest) is not None:
                self.state = replace(self.state, kept_step=newest)
                best = f"no tasks are held out; the checkpoint of step {newest} is kept"
            else:
                best = "no tasks are held out, and there is no checkpoint yet"
            self._warn(f"step {report.step}: {message}. {best[0].upper()}{best[1:]}.")

    def _warn(self, message: str | None) -> None:
        if message is None:
            return
        for observer in self._observers:
            observer.warn(message)

    def _report_progress(self, step: int, done: int, total: int, what: str) -> None:
        for observer in self._observers:
            observer.progress(step, done, total, what)

    async def _when_there_is_room(self, what: str, write: Callable[[], Awaitable[object] | None]) -> None:
        """Write something; while the disk is full, wait and try again."""
        failures = 0
        while True:
            try:
                writing = write()
                if writing is not None:
                    await writing
                return
            except Exception as error:
                if not is_disk_full(error):
                    raise
                failures += 1
                if failures == 1:
                    self._warn(f"{what} of step {self.state.step} cannot be written ({error}): waiting for room")
            await _ROOM_BACKOFF.wait(failures)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run heavy work on the one compute thread, so that the event loop stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


def _freeze_objects() -> None:
    """Exclude all that exists from later garbage collections.

    After the first step these are millions of objects of torch and of compiled layers. To look through them stops every
    thread of this process, among them the engine's, for half a second.
    """
    gc.collect()
    gc.freeze()


def _succeeded(episode: Episode) -> bool:
    outcome = episode.attempt.outcome
    return outcome is not None and outcome.ending is Ending.SUCCEEDED


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _nothing_to_learn(step: int, accounting: StepAccounting, episodes: Sequence[Episode]) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in accounting.excluded.most_common())
    advice = "run `leyden dev` to see what your agent does"
    if not any(episode.calls for episode in episodes):
        advice = NO_CALLS
    if accounting.calls_excluded["role not selected"]:
        roles = dict.fromkeys(episode.role(call) or "none" for episode in episodes for call in episode.calls)
        advice = f"calls had the roles {', '.join(roles)}; `training.roles` names those that are trained on"
        if "none" in roles:
            advice += f". {_HOW_ROLES_ARE_FOUND}"
    return f"step {step}: {accounting.groups_dropped} groups had too few rollouts to learn from ({why}): {advice}"
