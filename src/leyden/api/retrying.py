"""Repeats requests while their server is started again, is busy or fails.

Every request of the control API that workers and trainers make is idempotent.
"""

import asyncio
import copy
import math
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.client import Remote, RemoteError, ServerUnreachable
from leyden.api.endpoint import Endpoint
from leyden.backoff import Backoff

P = ParamSpec("P")
T = TypeVar("T")
_FIRST_BACKOFF_S = 0.1


class RetryLimits(Struct, frozen=True, kw_only=True):
    """When a request is repeated, reported and given up."""

    timeout_s: float | None = 30.0
    """How long one try may take; None: as long as `Remote` waits."""
    max_backoff_s: float = 5.0
    silent_failures: int = 0
    """Failures of a request that are not reported."""
    max_errors: float = math.inf
    """How often in a row the server may answer a request with a 500."""


_WORKER = RetryLimits()


class RetryingRemote(Remote):
    """A client of a server that may be down for a while. Outages are reported once; refusals are raised."""

    def __init__(
        self,
        url: str,
        key: str | None,
        report: Callable[[str], None],
        limits: RetryLimits = _WORKER,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_gone` tells that no server will answer any more."""
        super().__init__(url, key)
        self._report, self._limits, self._is_gone = report, limits, is_gone
        self._is_down = asyncio.Event()

    def limited(self, timeout_s: float, max_backoff_s: float = math.inf) -> Self:
        """Return the same client with other limits."""
        other, max_backoff_s = copy.copy(self), min(max_backoff_s, self._limits.max_backoff_s)
        other._limits = replace(self._limits, timeout_s=timeout_s, max_backoff_s=max_backoff_s)
        return other

    async def call(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Send a request until the server answers. Raises `RemoteError` if the server refuses it."""
        limits, failures, errors = self._limits, 0, 0
        backoff = Backoff(_FIRST_BACKOFF_S, limits.max_backoff_s)
        while True:
            try:
                async with asyncio.timeout(limits.timeout_s):
                    reply = await super().call(endpoint, *args, **kwargs)
            except (RemoteError, ServerUnreachable, TimeoutError) as error:
                failures += 1
                errors = errors + 1 if isinstance(error, RemoteError) and error.status == 500 else 0
                refused = isinstance(error, RemoteError) and not error.is_temporary
                if refused or errors > limits.max_errors or self._is_gone():
                    raise
                if failures > limits.silent_failures and not self._is_down.is_set():
                    self._is_down.set()
                    answered = f"it answers {error.status}: " if isinstance(error, RemoteError) else ""
                    reason = answered + (str(error) or f"it did not answer within {limits.timeout_s:g} s")
                    self._report(f"no answer from the server at {self.url}: {reason}; retrying until it answers")
                await backoff.wait(failures)
            else:
                if self._is_down.is_set():
                    self._is_down.clear()
                    self._report(f"the server at {self.url} answers again")
                return reply
