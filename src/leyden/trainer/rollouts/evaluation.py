"""Evaluates a policy on held-out tasks, through the same gateway and the same agent."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import fmean, stdev

from msgspec import Struct

from leyden.episodes import Episode
from leyden.outcomes import MEANING
from leyden.records import Purpose, Task
from leyden.trainer.rollouts.collector import RolloutCollector
from leyden.wire import GroupSpec


class EvaluationResult(Struct, frozen=True):
    """The result of an evaluation. Rollouts that do not count are only in `outcomes`."""

    reward: float | None
    error: float | None
    """The standard error of the mean."""
    counted: int
    outcomes: dict[str, int]


async def evaluate(
    collector: RolloutCollector,
    name: str,
    tasks: Sequence[Task],
    rollouts: int,
    failure_reward: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    step: int | None = None,
) -> tuple[EvaluationResult, list[Episode]]:
    """Run each task `rollouts` times; return the result and the episodes in the order of the tasks."""
    specs = [GroupSpec(f"{name}-{task.id}", task, rollouts, Purpose.EVAL, step=step) for task in tasks]
    done: dict[str, list[Episode]] = {}
    async for spec, group in collector.gather(specs):
        done[spec.id] = group
        progress(len(done) * rollouts, len(specs) * rollouts)
    episodes = [episode for spec in specs for episode in done[spec.id]]
    return measure(episodes, failure_reward), episodes


def measure(episodes: Sequence[Episode], failure_reward: float) -> EvaluationResult:
    """Compute the mean reward of the rollouts that count."""
    outcomes: Counter[str] = Counter()
    rewards = []
    for episode in episodes:
        assert episode.attempt.outcome is not None
        ending = episode.attempt.outcome.ending
        outcomes[str(ending)] += 1
        final = episode.final_reward(failure_reward)
        if MEANING[ending].counted and final is not None:
            rewards.append(final)
    return EvaluationResult(
        reward=fmean(rewards) if rewards else None,
        error=stdev(rewards) / sqrt(len(rewards)) if len(rewards) > 1 else None,
        counted=len(rewards),
        outcomes=dict(outcomes),
    )
