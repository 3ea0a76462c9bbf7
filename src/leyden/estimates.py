"""Estimates from rewards of tasks that were run several times: mean, standard error, pass@k, paired differences.

Rollouts of one task are not independent, so errors are computed from the spread between tasks, not between rollouts.
"""

from collections.abc import Mapping, Sequence
from math import comb, fsum, sqrt
from statistics import fmean, stdev

from msgspec import Struct

TaskRewards = Mapping[str, Sequence[float]]
"""By task, the rewards of its rollouts that count."""


class RewardEstimate(Struct, frozen=True):
    """A mean over the rollouts of some tasks."""

    mean: float
    error: float | None
    """The standard error of the mean, clustered by task; None with fewer than two tasks."""
    rollouts: int
    tasks: int


class PairedDifference(Struct, frozen=True):
    """The change from one evaluation to another, over the tasks that are in both."""

    first: float
    """Mean over the tasks of the first evaluation's mean reward; `second` likewise."""
    second: float
    difference: float
    error: float | None
    """The standard error of the difference, from the differences of the tasks; None with fewer than two tasks."""
    tasks: int
    unmatched: int
    """Tasks that only one of the two evaluations has."""


def estimate(rewards: TaskRewards) -> RewardEstimate | None:
    """Estimate the mean reward of a rollout; None without rewards."""
    clusters = [rewards_T for rewards_T in rewards.values() if rewards_T]
    every = [reward for rewards_T in clusters for reward in rewards_T]
    if not every:
        return None
    totals = [(len(rewards_T), fsum(rewards_T)) for rewards_T in clusters]
    return RewardEstimate(fmean(every), clustered_error(totals), len(every), len(clusters))


def clustered_error(totals: Sequence[tuple[int, float]]) -> float | None:
    """Return the standard error of a mean, from the number and the sum of each task's rewards.

    error^2 = G / (G - 1) sum over tasks of (sum of (x - mean) of the task)^2 / N^2, with G tasks and N rollouts. With
    one rollout per task this is the usual standard error. None with fewer than two tasks.
    """
    tasks, rollouts = len(totals), sum(count for count, _ in totals)
    if tasks < 2:
        return None
    mean = fsum(total for _, total in totals) / rollouts
    squares = fsum((total - count * mean) ** 2 for count, total in totals)
    return sqrt(tasks / (tasks - 1) * squares) / rollouts


def pass_at(rewards: TaskRewards, k: int, success: float) -> float | None:
    """Estimate the probability that at least one of k rollouts of a task has a reward of at least `success`.

    1 - C(n - c, k) / C(n, k) for c successes of n, which is unbiased, averaged over the tasks with at least k rollouts;
    None if there is no such task.
    """
    found = []
    for rewards_T in rewards.values():
        count = len(rewards_T)
        if count >= k:
            solved = sum(reward >= success for reward in rewards_T)
            found.append(1 - comb(count - solved, k) / comb(count, k))
    return fmean(found) if found else None


def compare(first: TaskRewards, second: TaskRewards) -> PairedDifference | None:
    """Compare two evaluations task by task; None if no task is in both."""
    means = [{task: fmean(given) for task, given in one.items() if given} for one in (first, second)]
    both = means[0].keys() & means[1].keys()
    if not both:
        return None
    differences = [means[1][task] - means[0][task] for task in sorted(both)]
    return PairedDifference(
        first=fmean(means[0][task] for task in both),
        second=fmean(means[1][task] for task in both),
        difference=fmean(differences),
        error=stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None,
        tasks=len(both),
        unmatched=len(means[0].keys() ^ means[1].keys()),
    )


def with_error(mean: float | None, error: float | None) -> str:
    """Format a mean with its standard error, such as `0.750 ± 0.031`."""
    if mean is None:
        return "-"
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"
