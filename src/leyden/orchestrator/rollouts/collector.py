"""Requests groups of rollouts and waits until each is finished.

Requests are idempotent by group name: a trainer that is restarted gets the groups that already exist.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec.structs import replace

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import CallTimes, EventCursor, GroupSpec
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.records import EventKind, Group, Task

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
        try:
            return await self.remote.group_episodes(self.run, name)
        except RemoteError as error:
            if error.status != 404:
                raise
            return []

    async def call_times(self) -> CallTimes:
        """Return how long the model calls of the run have taken so far, and at what."""
        return await self.remote.get_call_times(self.run)


class Gathering:
    """Groups that were requested and are waited for; more can be requested at any time."""

    def __init__(self, collector: RolloutCollector, drawn: Mapping[str, Task] | None = None) -> None:
        """`drawn` are the tasks, by id, one of which a group keeps that was requested earlier."""
        self._collector, self._after, self._drawn = collector, collector.after, drawn or {}
        self._remote, self._run = collector.remote, collector.run
        self._finished: list[str] = []
        self.waiting: dict[str, GroupSpec] = {}
        """By name, the groups whose episodes were not returned yet."""

    async def request(self, specs: Sequence[GroupSpec]) -> list[Group]:
        """Request groups."""
        requested: list[Group] = []
        for start in range(0, len(specs), _AT_ONCE):
            some = specs[start : start + _AT_ONCE]
            self.waiting.update({spec.id: spec for spec in some})
            groups = await asyncio.gather(*map(self._enqueue, some))
            self._finished += [group.id for group in groups if group.finished is not None]
            requested += groups
        return requested

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
            kept = await self._remote.get_group(self._run, spec.id)
            if kept.task in self._drawn and (kept.task, kept.origin) != (spec.task.id, spec.origin):
                return await self._enqueue(replace(spec, task=self._drawn[kept.task], origin=kept.origin))
            raise TrainingError(
                f"an earlier start of the run requested other rollouts here ({refused}): set `tasks` and "
                "`evaluation.rollouts` back to what they were, or start over with --restart"
            ) from refused
