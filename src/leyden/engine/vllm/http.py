"""HTTP to a vLLM server: streamed generations that can be cut, and calls of its control routes."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.wire import error_message

_GENERATE = "/inference/v1/generate"
_JSON = {"Content-Type": "application/json"}
_KEEPALIVE_S = 3.0
"""vLLM's front end closes connections that are idle for 5 seconds, unless it was started otherwise."""
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
_TRIES = 3
"""A pooled connection may be closed just when it is used: a request that got no answer at all is sent again."""
_RESTART_LIMIT_S, _RECONNECT_S = 900.0, 0.5
"""While vLLM is restarted nothing listens at its socket: requests wait so long for it, and look so often."""
_EVENT_END = b"\n\n"


def session(location: str) -> aiohttp.ClientSession:
    """Open connections to a server, as many as are needed, without time limits.

    A location is the path of a Unix socket or an http:// URL.
    """
    return _client(location, limit=0, keepalive_timeout=_KEEPALIVE_S)


def control(location: str) -> aiohttp.ClientSession:
    """For `call`: every call has a connection of its own, because a call that failed half-way cannot be repeated."""
    return _client(location, force_close=True)


def _client(location: str, **options: Any) -> aiohttp.ClientSession:
    if location.startswith("http://"):
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(**options)
        return aiohttp.ClientSession(location, connector=connector, timeout=_NO_LIMIT)
    connector = aiohttp.UnixConnector(location, **options)
    return aiohttp.ClientSession("http://vllm", connector=connector, timeout=_NO_LIMIT)


async def is_healthy(client: aiohttp.ClientSession) -> bool:
    """Return whether the server answers."""
    with suppress(aiohttp.ClientError, OSError):
        async with client.get("/health") as response:
            return response.status == 200
    return False


class HttpStream:
    """One streamed generation. `cut` ends it from outside: it then yields no more, and vLLM aborts the request."""

    def __init__(self, session: aiohttp.ClientSession, body: bytes) -> None:
        self.is_cut = False
        self._session, self._body = session, body
        self._posting: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._response: aiohttp.ClientResponse | None = None

    def cut(self) -> None:
        """Close the connection."""
        self.is_cut = True
        if self._response is not None:
            self._response.close()
        elif self._posting is not None:
            self._posting.cancel()

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Whole server-sent events, as many as have arrived. Raises `EngineError`."""
        try:
            response = self._response = await self._post()
            if response is None:
                return
            if response.status != 200:
                raise EngineError(f"vLLM refused a request: {error_message(await response.read())}")
            rest = b""
            async for data in response.content.iter_any():
                whole, end, rest = (rest + data).rpartition(_EVENT_END)
                if self.is_cut:
                    return
                if end:
                    yield whole
        except (aiohttp.ClientError, OSError) as error:
            if not self.is_cut:
                raise _lost(error) from error
        finally:
            if self._response is not None:
                self._response.close()

    async def _post(self) -> aiohttp.ClientResponse | None:
        """Send the request; None where it was cut meanwhile. A vLLM that is being restarted is waited for."""
        tries, deadline = _TRIES, time.monotonic() + _RESTART_LIMIT_S
        while not self.is_cut:
            self._posting = asyncio.create_task(_post(self._session, _GENERATE, self._body))
            try:
                response = await self._posting
            except asyncio.CancelledError:
                if self.is_cut and not _is_cancelling():
                    return None
                raise
            except aiohttp.ClientConnectorError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_RECONNECT_S)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                tries -= 1
                if not tries:
                    raise
            else:
                if not self.is_cut:
                    return response
                response.close()
        return None


async def call(session: aiohttp.ClientSession, path: str, body: Any = None, **query: str) -> Any:
    """Call a control route, and return its JSON. Raises `EngineError` where it fails."""
    data = None if body is None else msgspec.json.encode(body)
    try:
        async with session.post(path, data=data, headers=_JSON, params=query) as response:
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(error) from error
    if response.status != 200:
        raise EngineError(f"vLLM's {path} failed: {error_message(answer)}")
    return msgspec.json.decode(answer) if answer else None


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> aiohttp.ClientResponse:
    return await session.post(url, data=body, headers=_JSON)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _lost(error: Exception) -> EngineError:
    return EngineError(f"the connection to vLLM is lost: {str(error) or type(error).__name__}")
