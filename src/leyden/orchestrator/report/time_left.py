"""Estimates how long a run still takes, and says when its time limit is over."""

import time
from collections import deque
from math import inf
from statistics import fmean


class TimeLeft:
    """The time of a run, measured from now."""

    def __init__(self, limit_s: float | None) -> None:
        self._deadline = time.monotonic() + (limit_s or inf)
        self._durations: deque[float] = deque(maxlen=10)
        self._last = time.monotonic()

    def start(self) -> None:
        """Begin the first step."""
        self._last = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() >= self._deadline

    def end_step(self, steps_left: int) -> float:
        """End a step; return the seconds that are left, at the pace of the last steps and within the limit."""
        now = time.monotonic()
        self._durations.append(now - self._last)
        self._last = now
        return min(fmean(self._durations) * steps_left, max(0.0, self._deadline - time.monotonic()))
