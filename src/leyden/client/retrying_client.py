"""What a worker asks of its server, again and again until there is an answer."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from leyden.remote import Remote, RemoteError

T = TypeVar("T")

_log = logging.getLogger("leyden.worker")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class RetryingClient:
    """A server that may be away for a while. Its refusals are raised; its absence is waited out, and logged once."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.crowding: float | None = None
        """How many calls wait for the engine for each that it serves, as the server said last."""
        self._away = False

    async def insist(
        self, ask: Callable[[], Awaitable[T]], within_s: float = 30.0, pause_s: float = _LONGEST_PAUSE_S
    ) -> T:
        """Ask until the server answers, giving each try `within_s`, and waiting `pause_s` at the most in between."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(within_s):
                    answer = await ask()
            except RemoteError as refused:
                if refused.status < 500 and refused.status not in (408, 429):
                    raise
                why = f"{refused.status}: {refused}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            else:
                if self._away:
                    self._away = False
                    _log.warning("the server at %s is there again", self.remote.url)
                return answer
            if not self._away:
                self._away = True
                _log.warning("the server at %s does not answer (%s): trying until it does", self.remote.url, why)
            await asyncio.sleep(min(pause, pause_s) * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
