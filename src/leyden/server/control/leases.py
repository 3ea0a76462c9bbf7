"""The active leases in memory, kept current by the store's events, so that checking a key needs no query."""

from collections.abc import Iterable

import msgspec

from leyden.records import Event, EventKind, trace_id
from leyden.store.write.queue import ActiveLease


class ActiveLeases:
    """Every active attempt, by its id and by its trace id."""

    def __init__(self, active: Iterable[ActiveLease] = ()) -> None:
        self._by_id: dict[str, ActiveLease] = {}
        self._by_trace: dict[str, ActiveLease] = {}
        for lease in active:
            self._add(lease)

    def __len__(self) -> int:
        return len(self._by_id)

    def on_event(self, event: Event) -> None:
        """Update from the log."""
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._add(msgspec.convert(event.data, ActiveLease))
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._by_id.pop(event.subject, None)
            self._by_trace.pop(trace_id(event.subject), None)

    def is_active(self, attempt: str | None, started: float | None) -> bool:
        """Whether an attempt is active and started at this time."""
        lease = self._by_id.get(attempt or "")
        return lease is not None and lease.started == started

    def in_pool(self, attempt: str, pool: str | None) -> bool:
        """Whether an attempt is active and was leased to a pool."""
        lease = self._by_id.get(attempt)
        return lease is not None and pool is not None and lease.pool == pool

    def accepts_rewards(self, attempt: str) -> bool:
        """Whether an attempt is active and its run accepts rewards from agents."""
        lease = self._by_id.get(attempt)
        return lease is not None and lease.agent_rewards

    def get(self, attempt: str) -> ActiveLease | None:
        """Return an active attempt by its id."""
        return self._by_id.get(attempt)

    def by_trace(self, trace: str) -> ActiveLease | None:
        """Return an active attempt by its trace id."""
        return self._by_trace.get(trace)

    def _add(self, lease: ActiveLease) -> None:
        self._by_id[lease.attempt] = lease
        self._by_trace[trace_id(lease.attempt)] = lease
