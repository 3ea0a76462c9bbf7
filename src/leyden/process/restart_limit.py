"""Limits how often a process that keeps failing is started again."""

import time
from collections import deque


class RestartLimit:
    """Counts failures, and says when there were too many within a time."""

    def __init__(self, failures: int, within_s: float) -> None:
        self._times: deque[float] = deque(maxlen=failures)
        self._failures, self._within_s = failures, within_s

    def add_failure(self, at: float | None = None) -> bool:
        """Count a failure, now or at a time of the caller's clock; return whether it is the last of too many."""
        self._times.append(time.monotonic() if at is None else at)
        return len(self._times) == self._failures and self._times[-1] - self._times[0] < self._within_s
