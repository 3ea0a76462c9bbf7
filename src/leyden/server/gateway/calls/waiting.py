"""Measures how long calls wait for the infrastructure. No rollout is charged for it.

They wait in the queue, while weights change, while the engine is being restarted, and while the store cannot write.
"""

import time
from collections.abc import Iterable
from typing import Literal

from leyden.records import WaitInterval

_SHORTEST_S = 0.001
"""Shorter waits are not recorded: a call that gets its slot at once waited for nothing."""


WaitCause = Literal["scheduler", "engine", "store"]


class WaitTimer:
    """Collects the intervals in which one call waits, for any cause. `begin` and `end` may be repeated."""

    def __init__(self) -> None:
        self._intervals: list[WaitInterval] = []
        self._since: float | None = None
        self._causes: set[WaitCause] = set()

    def begin(self, cause: WaitCause) -> None:
        """Start an interval, unless one is open."""
        self._causes.add(cause)
        if self._since is None:
            self._since = time.time()

    def end(self, cause: WaitCause) -> None:
        """End the open interval, unless the call waits for another cause too."""
        self._causes.discard(cause)
        if self._since is not None and not self._causes:
            self._intervals = list(self.intervals())
            self._since = None

    def intervals(self) -> tuple[WaitInterval, ...]:
        """Return the intervals so far; one that has not ended ends now."""
        if self._since is None or (now := time.time()) - self._since < _SHORTEST_S:
            return tuple(self._intervals)
        return (*self._intervals, WaitInterval(self._since, now))


def total_s(intervals: Iterable[WaitInterval]) -> float:
    """Return the time that the intervals cover together; what several cover counts once."""
    total, covered = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda interval: interval.started):
        total += max(0.0, interval.ended - max(interval.started, covered))
        covered = max(covered, interval.ended)
    return total
