"""HTTP client of the control API. Workers, the trainer and the command line use it.

A request fails in one of three ways: the server refuses it (`RemoteError`), the server cannot be reached
(`ServerUnreachable`), or it is reached and does not answer in time (`ReplyTimeout`).
"""

import asyncio
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden.api.endpoint import Endpoint
from leyden.api.endpoints import ControlApi
from leyden.api.wire import RUN_ENDED
from leyden.backoff import Backoff
from leyden.config import ConfigError
from leyden.decoding import NotJson, decode_json, decode_text

P = ParamSpec("P")
T = TypeVar("T")

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_CONNECT_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 330.0
"""Longer than the longest `wait` of a request."""
_FIRST_BACKOFF_S = 0.1


class RemoteError(Exception):
    """The server refused a request. `status` and `reason` classify the refusal; the message explains it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def is_end_of_run(self) -> bool:
        """Whether a worker was told that its run is done."""
        return self.reason == RUN_ENDED

    @property
    def is_temporary(self) -> bool:
        """Whether the server failed or is busy: the same request may succeed later. Workers and trainers repeat it."""
        return self.status >= 500 or self.status in (408, 429)


class ServerUnreachable(ConnectionError):
    """The connection to the server could not be made, or broke."""


class ReplyTimeout(TimeoutError):
    """The server was connected but did not reply in time. It may still carry out the request."""


class Remote(ControlApi):
    """A server and the key to use with it, with a method for each endpoint. Use it as an async context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"accept": _MSGPACK, **({"authorization": f"Bearer {key}"} if key else {})}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=_REPLY_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Send one request and decode its reply."""
        request = endpoint.bind(*args, **kwargs)
        data, content_type = _encode(request.body)
        query: dict[str, Any] = msgspec.to_builtins(request.query) if request.query is not None else {}
        params = {name: value for name, value in query.items() if value is not None}
        headers = {"content-type": content_type}
        try:
            async with self._session.request(
                endpoint.method, self.url + request.path, data=data, headers=headers, params=params
            ) as response:
                reply = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(f"cannot reach the server at {self.url} ({error})") from error
        except TimeoutError as error:
            raise ReplyTimeout(f"the server at {self.url} did not answer within {_REPLY_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"cannot reach the server at {self.url} ({error})") from error
        if response.status >= 400:
            raise _error(response.status, reply)
        try:
            if response.content_type == _MSGPACK:
                return msgspec.msgpack.decode(reply, type=endpoint.returns)
            return decode_json(reply or b"null", endpoint.returns)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotJson) as error:
            raise RemoteError(
                response.status, "unknown", f"{self.url} does not answer like a Leyden server of this version: {error}"
            ) from error


def read_key(path: Path) -> str:
    """Read a key from its file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not the file of a key: an admin.key is written again by its server") from error


def _encode(body: Any) -> tuple[bytes | None, str]:
    if body is None:
        return None, _JSON
    try:
        return msgspec.msgpack.encode(body), _MSGPACK
    except OverflowError:  # an integer of more than 64 bits
        return msgspec.json.encode(body), _JSON


def _error(status: int, data: bytes) -> RemoteError:
    try:
        error = decode_json(data, dict[str, Any])["error"]
        return RemoteError(status, error["type"], error["message"])
    except (NotJson, KeyError, TypeError):
        return RemoteError(status, "unknown", decode_text(data[:200]))


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
    """A client of a server that may be down for a while. Outages are reported once; refusals are raised.

    Every request of the control API that workers and trainers make is idempotent, so that it can be repeated.
    """

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
