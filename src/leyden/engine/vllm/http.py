"""HTTP to a vLLM server: streamed generations that can be aborted, and calls of its control routes."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from leyden.engine.protocol import RESTART_LIMIT_S, EngineError, EngineLost
from leyden.engine.vllm.wire import error_message

_GENERATE = "/inference/v1/generate"
_JSON = {"Content-Type": "application/json"}
_KEEPALIVE_S = 3.0
"""vLLM's front end closes connections that are idle for 5 seconds, unless it was started otherwise."""
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
_HEALTH_TIMEOUT_S = 20.0
"""How long a server may take to say that it is healthy; one with many requests takes seconds."""
_TRIES = 3
"""A pooled connection may be closed just when it is used: a request that got no answer at all is sent again."""
_RECONNECT_S = 0.5
"""While vLLM is restarted nothing listens at its socket: how often requests try whether it answers.

Before that, a vLLM whose engine core has died answers every request with a 5xx, for up to 5 seconds."""
_EVENT_END = b"\n\n"


def session(location: str) -> aiohttp.ClientSession:
    """Return a client for generations: any number of connections, without time limits.

    A location is the path of a Unix socket or an http:// URL.
    """
    return _client(location, limit=0, keepalive_timeout=_KEEPALIVE_S)


def control(location: str) -> aiohttp.ClientSession:
    """Return a client for `call`. It reuses no connection: a call on one that was just closed cannot be repeated."""
    return _client(location, force_close=True)


def _client(location: str, **options: Any) -> aiohttp.ClientSession:
    if location.startswith("http://"):
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(**options)
        return aiohttp.ClientSession(location, connector=connector, timeout=_NO_LIMIT)
    connector = aiohttp.UnixConnector(location, **options)
    return aiohttp.ClientSession("http://vllm", connector=connector, timeout=_NO_LIMIT)


async def is_healthy(client: aiohttp.ClientSession) -> bool:
    """Whether the server answers, within a time limit."""
    with suppress(aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
        async with client.get("/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)) as response:
            return response.status == 200
    return False


class HttpStream:
    """One streamed generation. After `abort` it yields nothing more, and vLLM aborts the request."""

    def __init__(self, session: aiohttp.ClientSession, body: bytes) -> None:
        self.aborted = False
        self._session, self._body = session, body
        self._posting: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._response: aiohttp.ClientResponse | None = None

    def abort(self) -> None:
        """Close the connection."""
        self.aborted = True
        if self._response is not None:
            self._response.close()
        elif self._posting is not None:
            self._posting.cancel()

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events as they arrive, one or more at once, never a part of one, or a whole answer.

        Yields b"" while it waits for a vLLM that is being restarted. Raises `EngineError`.
        """
        deadline = time.monotonic() + RESTART_LIMIT_S
        try:
            while True:
                try:
                    response = self._response = await self._post()
                    break
                except (aiohttp.ClientConnectorError, EngineLost):
                    if time.monotonic() >= deadline:
                        raise
                yield b""
                await asyncio.sleep(_RECONNECT_S)
            if response is None:
                return
            if response.status != 200:
                raise EngineError(f"vLLM refused a request: {error_message(await response.read())}")
            rest = b""
            async for data in response.content.iter_any():
                whole, end, rest = (rest + data).rpartition(_EVENT_END)
                if self.aborted:
                    return
                if end:
                    yield whole
            if rest and not self.aborted:
                yield rest
        except (aiohttp.ClientError, OSError) as error:
            if not self.aborted:
                raise _lost(error) from error
        finally:
            if self._response is not None:
                self._response.close()

    async def _post(self) -> aiohttp.ClientResponse | None:
        """Send the request; None if it was aborted meanwhile."""
        tries = _TRIES
        while not self.aborted:
            self._posting = asyncio.create_task(_post(self._session, self._body))
            try:
                response = await self._posting
            except asyncio.CancelledError:
                if self.aborted and not _is_cancelling():
                    return None
                raise
            except aiohttp.ClientConnectorError:  # a ClientOSError, too
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                tries -= 1
                if not tries:
                    raise
            else:
                if not self.aborted:
                    return response
                response.close()
        return None


async def read(session: aiohttp.ClientSession, path: str) -> Any:
    """Read a control route. Raises `EngineError` if it fails."""
    return await _request(session, "GET", path, None, {})


async def call(session: aiohttp.ClientSession, path: str, body: Any = None, **query: str) -> Any:
    """Call a control route and return its JSON, if it sends any. Raises `EngineError` if it fails."""
    return await _request(session, "POST", path, body, query)


async def _request(session: aiohttp.ClientSession, method: str, path: str, body: Any, query: dict[str, str]) -> Any:
    data = None if body is None else msgspec.json.encode(body)
    try:
        async with session.request(method, path, data=data, headers=_JSON, params=query) as response:
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(error) from error
    if response.status != 200:
        raise EngineError(f"vLLM's {path} failed: {error_message(answer)}")
    return msgspec.json.decode(answer) if answer and response.content_type == "application/json" else None


async def _post(session: aiohttp.ClientSession, body: bytes) -> aiohttp.ClientResponse:
    """Send a request for a generation. Raises `EngineLost` if vLLM fails it because its engine core has died."""
    response = await session.post(_GENERATE, data=body, headers=_JSON)
    if response.status >= 500:
        answer = await response.read()  # which frees the connection
        if not await is_healthy(session):
            raise EngineLost(f"vLLM is not healthy: {error_message(answer)}")
    return response


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _lost(error: Exception) -> EngineLost:
    return EngineLost(f"the connection to vLLM is lost: {str(error) or type(error).__name__}")
