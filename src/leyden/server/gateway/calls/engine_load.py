"""Counts what an engine did in the last minute: calls, failed calls and sampled tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

WINDOW_S = 60


class LoadCounts(Struct):
    """What an engine did in a second, or in the last minute."""

    calls: int = 0
    """Calls that have ended."""
    failed: int = 0
    """Those among them that ended with an error of the engine."""
    tokens: int = 0


class EngineLoad:
    """Counts by second, and forgets what is older than a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        """Calls that run now."""
        self._clock = clock
        self._seconds: deque[tuple[int, LoadCounts]] = deque(maxlen=WINDOW_S)

    @contextmanager
    def call(self, *errors: type[Exception]) -> Iterator[None]:
        """Count a call within this context; it has failed if one of these errors leaves the context."""
        self.running += 1
        failed = False
        try:
            yield
        except errors:
            failed = True
            raise
        finally:
            self.running -= 1
            second = self._now()
            second.calls += 1
            second.failed += failed

    def add_tokens(self, count: int) -> None:
        """Count sampled tokens."""
        self._now().tokens += count

    def recent(self) -> LoadCounts:
        """Return the totals of the last minute."""
        since = int(self._clock()) - WINDOW_S
        kept = [counts for at, counts in self._seconds if at > since]
        return LoadCounts(*(sum(getattr(one, name) for one in kept) for name in LoadCounts.__struct_fields__))

    def _now(self) -> LoadCounts:
        at = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != at:
            self._seconds.append((at, LoadCounts()))
        return self._seconds[-1][1]
