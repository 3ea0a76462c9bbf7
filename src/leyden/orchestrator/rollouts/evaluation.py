"""Evaluates a policy on held-out tasks, through the same gateway and the same agent."""

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.config import Config, trained_policies
from leyden.episodes import Episode
from leyden.estimates import PairedDifference, TaskRewards, estimate, pass_at
from leyden.orchestrator.rollouts.call_usage import CallUsage
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.records import Purpose, Task

_ENOUGH_ROLLOUTS, _MAX_REPEATS = 32, 4
HIGHEST_PRIORITY = 10
"""The highest priority of a group."""


class EvaluationResult(Struct, frozen=True):
    """The result of an evaluation. Rollouts that do not count are only in `outcomes`."""

    reward: float | None
    error: float | None
    """The standard error of the mean, clustered by task."""
    counted: int
    """Rollouts that the mean is over."""
    outcomes: dict[str, int]
    pass_at: dict[int, float] = {}
    """By k, the share of tasks that at least one of k rollouts solves; empty with one rollout per task."""
    rewards: TaskRewards = {}
    """By task, the rewards of its rollouts that count."""
    change: PairedDifference | None = None
    """The difference to the evaluation before the first step, in pairs of tasks."""
    usage: CallUsage | None = None
    """What the calls of trained policies used; None if they were not counted."""


async def evaluate(
    collector: RolloutCollector,
    name: str,
    tasks: Sequence[Task],
    config: Config,
    progress: Callable[[int, int], None] = lambda done, total: None,
    step: int | None = None,
    purpose: Purpose = Purpose.EVAL,
) -> tuple[EvaluationResult, list[Episode]]:
    """Run each task `rollouts_per_task` times; return the result and the episodes in the order of the tasks."""
    rollouts = rollouts_per_task(config, len(tasks))
    # beside rollouts to train on, those of an evaluation come first: the next publication waits for them
    priority = HIGHEST_PRIORITY if config.training.max_staleness else 0
    specs = [GroupSpec(f"{name}-{task.id}", task, rollouts, purpose, priority, step=step) for task in tasks]
    done: dict[str, list[Episode]] = {}
    progress(0, len(specs) * rollouts)
    async for spec, group in collector.gather(specs):
        done[spec.id] = group
        progress(len(done) * rollouts, len(specs) * rollouts)
    episodes = [episode for spec in specs for episode in done[spec.id]]
    usage = CallUsage()
    usage.add(episodes, trained_policies(config))
    measured = measure(episodes, config.rollout.failure_reward, config.evaluation.success)
    return replace(measured, usage=usage), episodes


def rollouts_per_task(config: Config, tasks: int) -> int:
    """Return how often each task is run: few tasks several times, because their mean has a large error."""
    return config.evaluation.rollouts or max(1, min(_MAX_REPEATS, _ENOUGH_ROLLOUTS // max(1, tasks)))


def measure(episodes: Sequence[Episode], failure_reward: float, success: float) -> EvaluationResult:
    """Compute mean, standard error and pass@k of the rollouts that count."""
    outcomes: Counter[str] = Counter()
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        assert episode.attempt.outcome is not None
        outcomes[str(episode.attempt.outcome.ending)] += 1
        final = episode.final_reward(failure_reward)
        if final is not None:
            rewards.setdefault(episode.task.id, []).append(final)
    found = estimate(rewards)
    return EvaluationResult(
        reward=found.mean if found is not None else None,
        error=found.error if found is not None else None,
        counted=found.rollouts if found is not None else 0,
        outcomes=dict(outcomes),
        pass_at=_pass_at(rewards, success),
        rewards=rewards,
    )


def _pass_at(rewards: TaskRewards, success: float) -> dict[int, float]:
    """Compute pass@k for k = 1, 2, 4, ... and for the number of rollouts per task."""
    most = max(map(len, rewards.values()), default=0)
    if most < 2:
        return {}
    found = {k: pass_at(rewards, k, success) for k in sorted({*(2**n for n in range(most.bit_length())), most})}
    return {k: share for k, share in found.items() if share is not None}
