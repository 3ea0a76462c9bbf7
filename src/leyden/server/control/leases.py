"""The active attempts in memory, kept current by the store's events, so that checking a key needs no query."""

from collections.abc import Iterable

import msgspec

from leyden.records import Attempt, Event, EventKind, trace_id


class ActiveLeases:
    """Every attempt that has not ended, by its id and by its trace id."""

    def __init__(self, active: Iterable[Attempt] = ()) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_trace: dict[str, Attempt] = {}
        for attempt in active:
            self._add(attempt)

    def __len__(self) -> int:
        return len(self._by_id)

    def on_event(self, event: Event) -> None:
        """Update from the log."""
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._add(msgspec.convert(event.data, Attempt))
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._by_id.pop(event.subject, None)
            self._by_trace.pop(trace_id(event.subject), None)

    def is_active(self, attempt: str | None, started: float | None) -> bool:
        """Whether an attempt is active and started at this time."""
        found = self._by_id.get(attempt or "")
        return found is not None and found.started == started

    def in_pool(self, attempt: str, pool: str | None) -> bool:
        """Whether an attempt is active and was leased to a pool."""
        found = self._by_id.get(attempt)
        return found is not None and pool is not None and found.pool == pool

    def get(self, attempt: str) -> Attempt | None:
        """Return an active attempt by its id."""
        return self._by_id.get(attempt)

    def by_trace(self, trace: str) -> Attempt | None:
        """Return an active attempt by its trace id."""
        return self._by_trace.get(trace)

    def _add(self, attempt: Attempt) -> None:
        self._by_id[attempt.id] = attempt
        self._by_trace[attempt.trace_id] = attempt
