"""Repeats the requests of a trainer while its server is started again, is busy or fails.

Every request of the control API that a trainer makes is idempotent.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from leyden.api.client import Remote, RemoteError, ReplyTimeout, ServerUnreachable
from leyden.backoff import Backoff
from leyden.local.notes import print_note

T = TypeVar("T")
_BACKOFF = Backoff(first_s=0.1, max_s=2.0)
_SILENT_FAILURES = 6
"""A failed request is reported after this many failures; a server that is started again answers sooner."""
_MAX_ERRORS = 30
"""A server that answers a request with a 500 for about a minute will not stop: the error ends the training."""


class RetryingRemote(Remote):
    """A client that repeats a request until the server answers it, or `is_gone` says that no server will."""

    def __init__(self, url: str, key: str, is_gone: Callable[[], bool]) -> None:
        super().__init__(url, key)
        self._is_gone = is_gone
        self._reported = False

    async def request(
        self, method: str, path: str, returns: type[T], body: Any = None, **query: str | float | None
    ) -> T:
        """Send a request until the server answers. Raises `RemoteError` where the server refuses it."""
        failures = errors = 0
        while True:
            try:
                reply = await super().request(method, path, returns, body, **query)
            except (ServerUnreachable, ReplyTimeout, RemoteError) as error:
                failures += 1
                errors = errors + 1 if isinstance(error, RemoteError) and error.status == 500 else 0
                refused = isinstance(error, RemoteError) and not error.is_temporary
                if refused or errors > _MAX_ERRORS or self._is_gone():
                    raise
                if failures >= _SILENT_FAILURES:
                    self._report(f"waiting for the server: {error}")
                await _BACKOFF.wait(failures)
            else:
                self._reported = False
                return reply

    def _report(self, message: str) -> None:
        """Print the first failure of an outage."""
        if not self._reported:
            self._reported = True
            print_note(message)
