"""The places of a lane: how many attempts it may be at, and how many it makes use of.

More rollouts than the engine can serve only wait, and what they will be trained on grows stale. So while more calls
wait than are being served, fewer places are open: a fifth fewer, once in as many ends as there were open places. While
less than half as many wait, each end opens one more. Between the two the engine has work in store, and nothing changes.
One place is always open.
"""

import asyncio

_CROWDED, _ROOMY = 1.0, 0.5
_LESS = 0.8


class ConcurrencyLimit:
    """So many places, all of them open at first."""

    def __init__(self, places: int) -> None:
        self._places = self._open = places
        self._taken = self._ends = 0
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        """How many may be taken by now."""
        return self._open

    async def take(self) -> int:
        """Wait for a place; take it and all others that are free, and say how many."""
        while self._taken >= self._open:
            self._changed.clear()
            await self._changed.wait()
        free = self._open - self._taken
        self._taken = self._open
        return free

    def release(self, places: int = 1) -> None:
        """Give places back."""
        self._taken -= places
        self._changed.set()

    def feel(self, crowding: float | None) -> None:
        """An attempt has ended, and so many calls wait for each that is served; None: nobody knows."""
        self._ends += 1
        if crowding is None:
            return
        if crowding > _CROWDED and self._ends >= self._open:
            self._open, self._ends = max(1, int(_LESS * self._open)), 0
        elif crowding < _ROOMY and self._open < self._places:
            self._open += 1
            self._changed.set()
