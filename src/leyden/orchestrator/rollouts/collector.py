"""Requests groups of rollouts and waits until each is finished.

Requests are idempotent by group name: a trainer that is restarted gets the groups that already exist.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import CallTimes, EventCursor, GroupSpec
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.orchestrator.rollouts.source import group_name
from leyden.records import EventKind, Group

T = TypeVar("T")
MAX_WAIT_S = 60.0
"""A request waits no longer for an event."""
_AT_ONCE = 64
"""Requests to the server that do not wait for each other: it writes those that arrive together in one transaction."""


class RolloutCollector:
    """Collects the groups of one run. Several `gather` at the same time do not disturb each other."""

    def __init__(self, remote: Remote, run: str) -> None:
        self.remote, self.run = remote, run
        self.after = 0
        """An event that was read. Groups that are requested later have finished already, or finish after it."""

    async def gather(self, specs: Sequence[GroupSpec]) -> AsyncIterator[tuple[GroupSpec, list[Episode]]]:
        """Request groups; yield each with its episodes as soon as it is finished."""
        gathering = Gathering(self)
        await gathering.request(specs)
        while gathering.waiting:
            for found in await gathering.next():
                yield found

    async def find(self, name: str) -> list[Episode]:
        """Return the episodes of a group that may have been requested earlier; none if it was not."""
        return await _unless_missing(self.remote.group_episodes(self.run, name)) or []

    async def find_from(self, position: int) -> dict[int, Group]:
        """Return the groups to train on that an earlier process has requested, by position from this one on."""
        found: dict[int, Group] = {}
        while True:
            some = range(position, position + _AT_ONCE)  # of those that it requested at once any may be missing
            asked = (self.remote.get_group(self.run, group_name(one)) for one in some)
            groups = await asyncio.gather(*map(_unless_missing, asked))
            found |= {one: group for one, group in zip(some, groups, strict=True) if group is not None}
            if not any(groups):
                return found
            position = some.stop

    async def call_times(self) -> CallTimes:
        """Return how long the model calls of the run have taken so far, and at what."""
        return await self.remote.get_call_times(self.run)


class Gathering:
    """Groups that were requested and are waited for; more can be requested at any time."""

    def __init__(self, collector: RolloutCollector) -> None:
        self._collector, self._after = collector, collector.after
        self._remote, self._run = collector.remote, collector.run
        self._finished: list[str] = []
        self.waiting: dict[str, GroupSpec] = {}
        """By name, the groups whose episodes were not returned yet."""

    async def request(self, specs: Sequence[GroupSpec]) -> None:
        """Request groups."""
        for start in range(0, len(specs), _AT_ONCE):
            some = specs[start : start + _AT_ONCE]
            self.waiting.update({spec.id: spec for spec in some})
            groups = await asyncio.gather(*map(self._enqueue, some))
            self._finished += [group.id for group in groups if group.finished is not None]

    async def next(self, wait_s: float = MAX_WAIT_S) -> list[tuple[GroupSpec, list[Episode]]]:
        """Wait until groups are finished; return some of them with their episodes."""
        if not self._finished:
            cursor = EventCursor(self._after, wait=wait_s, kind=EventKind.GROUP_FINISHED)
            log = await self._remote.follow_events(self._run, cursor)
            self._after = log.after
            self._collector.after = max(self._collector.after, log.after)
            self._finished += [event.subject for event in log.events]
        names = [name for name in dict.fromkeys(self._finished) if name in self.waiting]
        names, self._finished = names[:_AT_ONCE], names[_AT_ONCE:]
        found = await asyncio.gather(*(self._remote.group_episodes(self._run, name) for name in names))
        return [(self.waiting.pop(name), episodes) for name, episodes in zip(names, found, strict=True)]

    async def _enqueue(self, spec: GroupSpec) -> Group:
        try:
            return await self._remote.enqueue(self._run, spec)
        except RemoteError as refused:
            if refused.status != 409:
                raise
            raise TrainingError(
                f"an earlier start of the run requested other rollouts here ({refused}): set `tasks` and "
                "`evaluation.rollouts` back to what they were, or start over with --restart"
            ) from refused


async def _unless_missing(asked: Awaitable[T]) -> T | None:
    try:
        return await asked
    except RemoteError as error:
        if error.status != 404:
            raise
        return None
