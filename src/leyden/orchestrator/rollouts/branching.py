"""Continues rollouts of a step from points inside them, to estimate the values of the states there.

Rollouts are continued in a random order, as long as the tokens that this probably takes are within the budget of the
step. Whether a rollout is continued so depends on nothing that it did. What a step samples beyond its budget is taken
from that of the next.
"""

from collections.abc import Sequence
from random import Random

from leyden.api.wire import GroupSpec
from leyden.config import Config
from leyden.episodes import Episode
from leyden.orchestrator.credit.samples import Groups, SelectedRollout
from leyden.orchestrator.rollouts.evaluation import HIGHEST_PRIORITY
from leyden.records import Origin
from leyden.rl.branch import Branch, Point


class Branching:
    """Chooses the continuations of steps."""

    def __init__(self, config: Config, branch: Branch, debt: float) -> None:
        """`debt` is what earlier steps have sampled beyond their budgets, in tokens."""
        self._config, self._branch, self.debt = config, branch, debt

    def plan(self, groups: Groups, sampled: Sequence[Episode], step: int) -> list[GroupSpec]:
        """Return the groups that continue rollouts of a step, in the order of these; `sampled` are all of the step."""
        named, seed = self._config.algorithm, f"{self._config.seed}/branching/{step}"
        priority = HIGHEST_PRIORITY if self._config.training.max_staleness else 0
        rollouts = [(group, rollout) for group in groups for rollout in group]
        order = Random(seed).sample(range(len(rollouts)), len(rollouts))
        left, specs_R = self._budget(sampled) - self.debt, dict[int, list[GroupSpec]]()
        for number in order:
            if left <= 0:
                break
            group, rollout = rollouts[number]
            points = self._points(rollout, group)
            # a continuation takes as many tokens as the rollout took from there, on average
            left -= named.continuations * sum(self._sampled(rollout.episode, calls) for calls in points)
            attempt = rollout.episode.attempt.id
            specs_R[number] = [
                GroupSpec(
                    f"{attempt}-{calls}",
                    rollout.episode.task,
                    named.continuations,
                    priority=priority,
                    step=step,
                    origin=Origin(attempt, calls),
                )
                for calls in points
            ]
        return [spec for number in sorted(specs_R) for spec in specs_R[number]]

    def add_step(self, sampled: Sequence[Episode], continuations: Sequence[Episode]) -> None:
        """Take what the continuations of a step have sampled from its budget."""
        used = sum(self._sampled(episode) for episode in continuations)
        self.debt = max(0.0, self.debt + used - self._budget(sampled))

    def _budget(self, sampled: Sequence[Episode]) -> float:
        return self._config.algorithm.branch_tokens * sum(self._sampled(episode) for episode in sampled)

    def _points(self, rollout: SelectedRollout, group: Sequence[SelectedRollout]) -> list[int]:
        """Return after how many calls a rollout is continued; not after its last call, where its return is known."""
        episode, named = rollout.episode, self._config.algorithm
        others = tuple(other.episode.calls for other in group if other is not rollout)
        first = episode.rollout.origin.calls if episode.rollout.origin is not None else 0
        found: list[int] = []
        for calls in range(first + 1, len(episode.calls)):
            if len(found) < named.branch_points and self._branch(Point(episode.calls[:calls], others), named):
                found.append(calls)
        return found

    def _sampled(self, episode: Episode, start: int = 0) -> int:
        """Count the tokens that the policy sampled in a rollout after some calls."""
        own = (call for call in episode.calls[start:] if not episode.inherits(call))
        return sum(len(call.completion_ids) for call in own if call.policy == self._config.policy)
