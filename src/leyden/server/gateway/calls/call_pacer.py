"""Lets few calls begin in each iteration of the event loop.

Building the prompt of a call takes milliseconds that nothing interrupts. When hundreds of calls arrive at once, the
first reach the engine while the others are still prepared, and no other request waits for all of them.
"""

import asyncio
from collections import deque

_CALLS_PER_ITERATION = 4


class CallPacer:
    """Gives calls their turns, in the order in which they ask."""

    def __init__(self, per_iteration: int = _CALLS_PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._begun = 0
        """Calls that began in this iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return when the call may begin."""
        loop = asyncio.get_running_loop()
        if self._waiting or self._begun == self._per_iteration:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if not self._begun:
            loop.call_soon(self._start_iteration)
        self._begun += 1

    def _start_iteration(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._per_iteration:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its caller has gone
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._start_iteration)
