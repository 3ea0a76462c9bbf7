"""HTTP client of the control API. Workers, the trainer and the command line use it.

A request fails in one of three ways: the server refuses it (`RemoteError`), the server cannot be reached
(`ServerUnreachable`), or it is reached and does not answer in time (`ReplyTimeout`).
"""

from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import aiohttp
import msgspec

from leyden.api.endpoint import Endpoint
from leyden.api.endpoints import ControlApi
from leyden.config import ConfigError
from leyden.decoding import NotJson, decode_json, decode_text

P = ParamSpec("P")
T = TypeVar("T")

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_CONNECT_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 330.0
"""Longer than the longest `wait` of a request."""


class RemoteError(Exception):
    """The server refused a request. `status` and `reason` classify the refusal; the message explains it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

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
