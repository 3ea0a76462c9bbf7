"""Continues hard tasks from inside their best rollouts, so that about half of the continuations succeed.

A task is hard if at most a quarter of the rollouts of its last group succeeded. Its next group begins inside its best
recent rollout: that one's first calls are replayed from the record, as context. The prefix grows if fewer than half of
the continuations succeed and shrinks if more do, until nothing is replayed, or everything that is trained on. At most
seven of eight groups continue a task; those that wait take turns.
"""

from collections.abc import Sequence
from math import log

from msgspec.structs import replace

from leyden.episodes import REPLAYED, Episode
from leyden.learner.protocol import BestRollout, OpenGroup, PrefixRecord
from leyden.orchestrator.credit.samples import SampleFilter
from leyden.orchestrator.rollouts.difficulty import count_successes
from leyden.orchestrator.rollouts.requested_group import RequestedGroup
from leyden.records import Group, Origin

_HARD = 0.25
"""Groups of more than that share of successes teach enough, and begin where the policy begins."""
_FROM_THE_START = 8
"""Of so many groups, one begins with its task at least."""
_RECENT_STEPS = 32
"""How long a rollout can be continued: the policy hardly reaches what a much older one has reached."""
_SHARES = 8
"""Over about how many groups the share is averaged with which a task begins."""


class Prefixes:
    """Chooses which tasks are continued, and where."""

    def __init__(
        self, success: float, failure_reward: float, filters: Sequence[SampleFilter], record: PrefixRecord
    ) -> None:
        """A rollout succeeds if its reward is at least `success`. `filters` are those of the policies that are trained.

        `record` is that of a run that is resumed.
        """
        self._success, self._failure_reward, self._filters = success, failure_reward, filters
        self._best, self._waiting, self._share = dict(record.best), [*record.waiting], record.share
        self.continued = record.continued
        """How many groups have continued a task."""

    @property
    def record(self) -> PrefixRecord:
        """What a run that is resumed needs to know."""
        return PrefixRecord(dict(self._best), tuple(self._waiting), self.continued, self._share)

    def take(self, position: int) -> OpenGroup | None:
        """Return the next group that continues a task, if the group at a position does."""
        if position % _FROM_THE_START == 0 or not self._waiting:
            return None
        self.continued += 1
        return self._waiting.pop(0)

    def keep(self, group: Group) -> OpenGroup | None:
        """Return a group that was requested before, if it continues a task."""
        if group.origin is None:
            return None
        self.continued += 1
        known = next((one for one in self._waiting if one.task == group.task), OpenGroup(0, 0, 0))
        self._waiting = [one for one in self._waiting if one is not known]
        return replace(known, task=group.task, origin=group.origin)

    def add_step(self, groups: Sequence[RequestedGroup], step: int) -> None:
        """Choose the tasks that can be continued after a step by the rewards of its groups."""
        for group in groups:
            again, task = self._continuation(group, step), group.spec.task.id
            self._waiting = [open for open in self._waiting if open.task != task] + ([again] if again else [])
        self._waiting = [one for one in self._waiting if self._is_recent(one.task or "", step)]

    def _continuation(self, group: RequestedGroup, step: int) -> OpenGroup | None:
        """Return the group that continues the task of a group."""
        scored = [
            (reward, episode)
            for episode in group.episodes or ()
            if not episode.left_origin and (reward := episode.final_reward(self._failure_reward)) is not None
        ]
        rewards, open, task = [reward for reward, _ in scored], group.open, group.spec.task.id
        if len(rewards) < 2:
            return None
        succeeded = count_successes(rewards, self._success) / len(rewards)
        self._keep_best(task, scored, step)
        if not self._is_recent(task, step):
            return None
        best = self._best[task]
        if open.origin is not None:
            share = max(1 - (1 - best.share) * _growth(succeeded), 0.0)
            best = self._best[task] = replace(best, share=share)
            if _is_inside(best):
                self._share += (share - self._share) / _SHARES
        elif succeeded > _HARD or min(rewards) >= self._success:
            return None
        elif not _is_inside(best):  # it is new, or was found to be easy or to fail in the end: begin the search anew
            best = replace(best, share=self._share)
            best = self._best[task] = best if _is_inside(best) else replace(best, share=0.5)
        if not _is_inside(best):
            return None
        return replace(open, task=task, origin=Origin(best.attempt, round(best.share * best.calls)))

    def _is_recent(self, task: str, step: int) -> bool:
        best = self._best.get(task)
        return best is not None and step - best.step <= _RECENT_STEPS

    def _keep_best(self, task: str, scored: Sequence[tuple[float, Episode]], step: int) -> None:
        """Keep the best rollout of a group, if it is as good as the best of the record.

        If all failed alike, none of them is known to be better than another: they are not kept.
        """
        rewards_R = [(reward, sum(one.reward for one in episode.transitions)) for reward, episode in scored]
        found = max(rewards_R)
        if found == min(rewards_R) and found[0] < self._success:
            return
        known, episode = self._best.get(task), scored[rewards_R.index(found)][1]
        if known is None or step - known.step > _RECENT_STEPS or found >= known.reward:
            share = known.share if known is not None else 0.0
            calls = min(self._last_trained(episode), episode.replayable + 1)
            self._best[task] = BestRollout(episode.attempt.id, calls, found, step, share)

    def _last_trained(self, episode: Episode) -> int:
        """Return the number of the last call that a continuation would be trained on: after it, none has a purpose."""
        reasons = [one.exclusion_reasons(episode) for one in self._filters]
        return max(
            (number for some in reasons for number, reason in enumerate(some, 1) if reason in (None, REPLAYED)),
            default=0,
        )


def _growth(succeeded: float) -> float:
    """Return how many times as many calls the next continuations sample, by the share of these that succeeded.

    Half of them succeed then, if any call is as likely to fail as another. It is at least 0.5 and at most 2.
    """
    if succeeded in (0.0, 1.0):
        return 0.5 + 1.5 * succeeded
    return min(max(log(0.5) / log(succeeded), 0.5), 2.0)


def _is_inside(best: BestRollout) -> bool:
    return 0 < round(best.share * best.calls) < best.calls
