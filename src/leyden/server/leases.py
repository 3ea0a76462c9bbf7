"""The leases in force, in memory: fed by the store's notifications, asked on every request, never looked up."""

from collections.abc import Iterable

import msgspec

from leyden.records import Event, EventKind, trace_id
from leyden.store.queue import ActiveLease


class ActiveLeases:
    """Every live attempt, by its id and by its trace."""

    def __init__(self, alive: Iterable[ActiveLease] = ()) -> None:
        self._by_id: dict[str, ActiveLease] = {}
        self._by_trace: dict[str, ActiveLease] = {}
        for live in alive:
            self._add(live)

    def __len__(self) -> int:
        return len(self._by_id)

    def hear(self, event: Event) -> None:
        """Follow the log."""
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._add(msgspec.convert(event.data, ActiveLease))
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._by_id.pop(event.subject, None)
            self._by_trace.pop(trace_id(event.subject), None)

    def alive(self, attempt: str | None, started: float | None) -> bool:
        """Whether the lease of an attempt that started then is in force."""
        live = self._by_id.get(attempt or "")
        return live is not None and live.started == started

    def hosted(self, attempt: str, pool: str | None) -> bool:
        """Whether an attempt is alive in a pool."""
        live = self._by_id.get(attempt)
        return live is not None and pool is not None and live.pool == pool

    def takes_rewards(self, attempt: str) -> bool:
        """Whether an attempt is alive, and its run takes rewards from the agent."""
        live = self._by_id.get(attempt)
        return live is not None and live.agent_rewards

    def find(self, attempt: str) -> ActiveLease | None:
        """A live attempt by its id."""
        return self._by_id.get(attempt)

    def traced(self, trace: str) -> ActiveLease | None:
        """A live attempt by the id of its trace."""
        return self._by_trace.get(trace)

    def _add(self, live: ActiveLease) -> None:
        self._by_id[live.attempt] = live
        self._by_trace[trace_id(live.attempt)] = live
