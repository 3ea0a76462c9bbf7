"""Requests groups of rollouts and waits until each is finished.

Requests are idempotent by group name: a trainer that is restarted gets the groups that already exist.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import CallTimes, EventCursor, GroupSpec
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.records import EventKind, Group

_WAIT_S = 60.0
_AT_ONCE = 64
"""Requests to the server that do not wait for each other: it writes those that arrive together in one transaction."""


class RolloutCollector:
    """Collects the groups of one run. Several `gather` at the same time do not disturb each other."""

    def __init__(self, remote: Remote, run: str) -> None:
        self.remote, self._run = remote, run
        self._after = 0
        """An event that was read. Groups that are requested later have finished already, or finish after it."""

    async def gather(self, specs: Sequence[GroupSpec]) -> AsyncIterator[tuple[GroupSpec, list[Episode]]]:
        """Request groups; yield each with its episodes as soon as it is finished."""
        after = self._after
        waiting = {spec.id: spec for spec in specs}
        finished = set[str]()
        for start in range(0, len(specs), _AT_ONCE):
            groups = await asyncio.gather(*map(self._enqueue, specs[start : start + _AT_ONCE]))
            finished.update(group.id for group in groups if group.finished is not None)
        while waiting:
            names = [name for name in waiting if name in finished][:_AT_ONCE]
            if not names:
                cursor = EventCursor(after, wait=_WAIT_S, kind=EventKind.GROUP_FINISHED)
                log = await self.remote.follow_events(self._run, cursor)
                finished.update(event.subject for event in log.events)
                after = self._after = log.after
            found = await asyncio.gather(*(self.remote.group_episodes(self._run, name) for name in names))
            for name, episodes in zip(names, found, strict=True):
                yield waiting.pop(name), episodes

    async def find(self, name: str) -> list[Episode]:
        """Return the episodes of a group that may have been requested earlier; none if it was not."""
        try:
            return await self.remote.group_episodes(self._run, name)
        except RemoteError as error:
            if error.status != 404:
                raise
            return []

    async def call_times(self) -> CallTimes:
        """Return how long the model calls of the run have taken so far, and at what."""
        return await self.remote.get_call_times(self._run)

    async def _enqueue(self, spec: GroupSpec) -> Group:
        try:
            return await self.remote.enqueue(self._run, spec)
        except RemoteError as refused:
            if refused.status != 409:
                raise
            raise TrainingError(
                f"an earlier start of the run requested other rollouts here ({refused}): set `tasks` and "
                "`evaluation.rollouts` back to what they were, or start over with --restart"
            ) from refused
