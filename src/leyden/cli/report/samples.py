"""Finds rollouts of the same held-out tasks before training and after it."""

from collections.abc import Mapping

from msgspec import Struct

from leyden.api.views import RolloutOrder, RolloutQuery
from leyden.api.wire import ListedRollout
from leyden.cli.dev import last_calls, message_text
from leyden.episodes import Episode
from leyden.records import Purpose
from leyden.runs.stored_runs import RunSource

_PAGE = 500


class SampleRollout(Struct, frozen=True):
    """One rollout: its step, its reward, and what was said."""

    step: int
    reward: float | None
    outcome: str
    messages: tuple[tuple[str, str], ...]
    """Role and text."""


class SamplePair(Struct, frozen=True):
    """A task, and a rollout of it at the first and at the last evaluation."""

    task: str
    before: SampleRollout
    after: SampleRollout


async def read_samples(source: RunSource, run: str, count: int) -> list[SamplePair]:
    """Return pairs of rollouts, those with the largest change of reward first; none if there was one evaluation."""
    first, last = await _evaluation(source, run, "step"), await _evaluation(source, run, "-step")
    both = [task for task in first if task in last and first[task].step != last[task].step]
    both.sort(key=lambda task: -abs((last[task].reward or 0.0) - (first[task].reward or 0.0)))
    return [
        SamplePair(task, await _sample(source, run, first[task]), await _sample(source, run, last[task]))
        for task in both[:count]
    ]


async def _evaluation(source: RunSource, run: str, order: RolloutOrder) -> Mapping[str, ListedRollout]:
    """Return a finished rollout of each task of the first (`step`) or last (`-step`) evaluation."""
    query = RolloutQuery(purpose=Purpose.EVAL, sort=order, limit=_PAGE)
    found = [one for one in (await source.search_rollouts(run, query)).rollouts if one.step is not None and one.outcome]
    return {one.task: one for one in reversed(found) if one.step == found[0].step}


async def _sample(source: RunSource, run: str, rollout: ListedRollout) -> SampleRollout:
    detail = await source.get_rollout(run, rollout.id)
    episode = await source.get_episode(run, detail.attempts[-1].id)
    assert rollout.step is not None and rollout.outcome is not None
    return SampleRollout(rollout.step, rollout.reward, str(rollout.outcome.ending), tuple(_messages(episode)))


def _messages(episode: Episode) -> list[tuple[str, str]]:
    return [
        (str(message.get("role")), message_text(message))
        for call in last_calls(episode)
        for message in (*episode.messages(call), call.response)
        if isinstance(message, dict)
    ]
