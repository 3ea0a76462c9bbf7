"""Asking for groups of rollouts, and waiting until each is finished.

Groups are asked for by name, so asking twice is asking once: a trainer that is started again gets what was done before.
"""

from collections.abc import AsyncIterator, Sequence

from leyden.episodes import Episode
from leyden.records import EventKind
from leyden.remote import Remote
from leyden.wire import GroupSpec

_WAIT_S = 60.0


class RolloutCollector:
    """The groups of one run."""

    def __init__(self, remote: Remote, run: str) -> None:
        self._remote, self._run = remote, run
        self._after = 0
        self._finished: set[str] = set()

    async def gather(self, specs: Sequence[GroupSpec]) -> AsyncIterator[tuple[GroupSpec, list[Episode]]]:
        """Ask for groups; each comes with its episodes as soon as it is finished."""
        waiting = {}
        for spec in specs:
            group = await self._remote.enqueue(self._run, spec)
            waiting[spec.id] = spec
            if group.finished is not None:
                self._finished.add(spec.id)
        while waiting:
            for name in [name for name in waiting if name in self._finished]:
                self._finished.discard(name)
                yield waiting.pop(name), await self._remote.group_episodes(self._run, name)
            if waiting:
                await self._listen()

    async def _listen(self) -> None:
        log = await self._remote.events(self._run, self._after, _WAIT_S, EventKind.GROUP_FINISHED)
        self._after = log.after
        self._finished.update(event.subject for event in log.events)
