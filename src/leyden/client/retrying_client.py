"""Sends a worker's requests to its server and repeats each until the server answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from leyden.api.client import Remote, RemoteError, ServerUnreachable
from leyden.backoff import Backoff

T = TypeVar("T")

_log = logging.getLogger("leyden.worker")
_BACKOFF = Backoff(first_s=0.1, max_s=5.0)
_TIMEOUT_S = 30.0


class RetryingClient:
    """A client of a server that may be down for a while. Outages are logged once; refusals are raised."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.queue_pressure: float | None = None
        """Model calls that wait for the engine per call that it serves, as the server last reported it."""
        self._server_down = False

    async def retry(
        self,
        request: Callable[[], Awaitable[T]],
        timeout_s: float = _TIMEOUT_S,
        max_backoff_s: float = _BACKOFF.max_s,
    ) -> T:
        """Send a request until the server answers. Each try may take `timeout_s`.

        Raises `RemoteError` where the server refuses it: a repetition would be refused too.
        """
        backoff = replace(_BACKOFF, max_s=min(_BACKOFF.max_s, max_backoff_s))
        failures = 0
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await request()
            except RemoteError as refused:
                if not refused.is_temporary:
                    raise
                reason = f"it answers {refused.status}: {refused}"
            except TimeoutError:
                reason = f"it did not answer within {timeout_s:g} s"
            except ServerUnreachable as error:
                reason = str(error)
            else:
                if self._server_down:
                    self._server_down = False
                    _log.warning("the server at %s answers again", self.remote.url)
                return answer
            if not self._server_down:
                self._server_down = True
                _log.warning("no answer from the server at %s: %s; retrying until it answers", self.remote.url, reason)
            failures += 1
            await backoff.wait(failures)
