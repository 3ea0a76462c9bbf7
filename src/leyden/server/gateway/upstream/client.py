"""The client of an upstream: any service with OpenAI's chat and completions APIs, for frozen roles and evaluation.

Its answers come without token ids, so they are recorded and never trained on.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from leyden import defaults
from leyden.decoding import NotJson, decode_json, decode_text
from leyden.records import Sampling
from leyden.server.gateway.calls.engine_load import EngineLoad
from leyden.server.gateway.dialects.left_out import LEFT_OUT
from leyden.server.gateway.dialects.types import LOADED_TOOLS, PREFIX, GenerationRequest, Message
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.upstream.text import as_chat, text_body
from leyden.server.http.responses import Raw
from leyden.server.http.streaming import StreamResponse

_DEFAULTS = Sampling()
_CONNECT_S = 30.0
_MAX_MESSAGE = 2000
"""Characters of an upstream's error that are passed on."""
_MAX_EVENT = 32 << 20
"""Bytes of an event of a stream."""
_KEEP_ALIVE_S = 2.0
"""Shorter than servers keep idle connections (uvicorn and Node: 5 s): a POST on one that was just closed would fail."""
_PASSED = ("reasoning_effort", "chat_template_kwargs")
"""Parameters of chat that are passed on as they are."""
_NOT_SENT = ("is_error", "reasoning_content", LEFT_OUT, LOADED_TOOLS, PREFIX)


class UpstreamClient:
    """Sends requests to one upstream, in one event loop; `timeout_s` bounds the time between two reads."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = defaults.UPSTREAM_TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": key if key.startswith("Basic ") else f"Bearer {key}"} if key else {}
        self._secret = (key or "").removeprefix("Basic ")
        self.load = EngineLoad()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    policy = "upstream"
    """The policy name of recorded upstream calls, and the route target that selects the upstream."""

    async def close(self) -> None:
        """Close the connections to the upstream."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def chat(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Send a request; yield an iterator over the chunks of the stream, or over the one whole completion.

        The context is entered when the upstream answers with success; leaving it closes the request.
        """
        body = (_body(request) if request.prompt is None else text_body(request)) | _sampling(request)
        path = "chat/completions" if request.prompt is None else "completions"
        async with self._send("POST", path, json=body) as reply:
            chunks = self._streamed(reply) if body.get("stream") else self._whole(reply)
            yield chunks if request.prompt is None else as_chat(chunks, request)

    async def models(self) -> list[str]:
        """Return the names of the upstream's models."""
        async with self._send("GET", "models") as reply:
            document = self._read(await reply.read())
        try:
            return [str(model["id"]) for model in document["data"]]
        except (LookupError, TypeError) as error:
            raise self._failed("did not answer with a list of models") from error

    async def forward(
        self, path: str, body: Raw, query: Mapping[str, str], accept: str, call: AbstractContextManager[None]
    ) -> StreamResponse:
        """Forward a request unread; return the answer as a stream. `call` is left when the answer has ended."""
        headers = {"content-type": body.content_type, "accept": accept or "*/*"}
        sending = self._send("POST", path, data=body.content, params=query, headers=headers)
        async with AsyncExitStack() as entered:
            entered.enter_context(call)
            reply = await entered.enter_async_context(sending)
            open_reply = entered.pop_all()

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with open_reply:
                async for chunk in reply.content.iter_any():
                    yield chunk

        return StreamResponse(chunks(), reply.headers.get("content-type", "application/octet-stream"))

    @asynccontextmanager
    async def _send(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        with self.load.call(GatewayError):
            try:
                async with self._open_session().request(
                    method, f"{self.url}/{path}", allow_redirects=False, **request
                ) as reply:
                    if reply.status >= 300:
                        raise self._refusal(reply.status, reply.headers, await reply.read())
                    yield reply
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise self._failed(f"cannot be reached: {error}") from error
            except TimeoutError as error:
                how = f"sent nothing for {self._timeout.sock_read:g} s (upstream.timeout_s, --upstream-timeout-s)"
                raise self._failed(how) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._failed(f"closed the connection: {str(error) or type(error).__name__}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session of all requests; the first one creates it, since it belongs to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie would be shared by the agents of all rollouts
            )
        return self._session

    async def _whole(self, reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        yield self._read(await reply.read())

    async def _streamed(self, reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        try:
            async for data in _read_events(reply.content.iter_any()):
                if data == b"[DONE]":
                    return
                yield self._read(data)
        except ValueError as error:
            raise self._failed(f"did not answer with a stream: {error}") from error

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            document: dict[str, Any] = decode_json(data, dict[str, Any])
        except NotJson as error:
            raise self._failed("did not answer with a completion") from error
        if "error" in document:
            raise self._failed(f"failed: {self._message(data)}")
        return document

    def _failed(self, how: str) -> GatewayError:
        return GatewayError(ErrorKind.FAILED, f"the upstream at {self.url} {how}")

    def _refusal(self, status: int, headers: Mapping[str, str], data: bytes) -> GatewayError:
        kind = {401: ErrorKind.FAILED, 403: ErrorKind.FAILED, 404: ErrorKind.NO_MODEL, 429: ErrorKind.RATE_LIMITED}.get(
            status, ErrorKind.INVALID if 400 <= status < 500 else ErrorKind.FAILED
        )
        wait = headers.get("Retry-After", "")
        retry_after = float(wait) if wait.isdecimal() else 1.0 if status == 429 else None
        message = f"the upstream at {self.url} refused: {self._message(data)}"
        return GatewayError(kind, message, retry_after=retry_after)

    def _message(self, data: bytes) -> str:
        """Return what an upstream says is wrong. Some repeat the key that they refuse, which no agent may see."""
        try:
            message = str(decode_json(data, dict[str, Any])["error"]["message"])
        except (NotJson, KeyError, TypeError):
            message = decode_text(data)
        hidden = message.replace(self._secret, "***") if self._secret else message
        return hidden[:_MAX_MESSAGE]


def _body(request: GenerationRequest) -> dict[str, Any]:
    """Write a request in the OpenAI chat format, without its sampling."""
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_plain(message) for message in request.messages],
        "n": request.n,
    }
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    tools = request.callable_tools or request.tools
    if tools:
        named = request.tool_choice.name
        choice: Any = {"type": "function", "function": {"name": named}} if named else request.tool_choice.mode
        body |= {"tools": tools, "tool_choice": choice}
        if not request.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if request.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.format is not None:
        body["response_format"] = request.format
    others = request.request if isinstance(request.request, dict) else {}
    return body | {name: others[name] for name in _PASSED if others.get(name) is not None}


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    """Return the sampling of a request; leave out what the caller left at its default."""
    return {
        name: value
        for name in Sampling.__struct_fields__
        if (value := getattr(request.sampling, name)) != getattr(_DEFAULTS, name)
    }


def _plain(message: Message) -> Message:
    """Drop the fields of a message that the OpenAI API does not have."""
    return {name: value for name, value in message.items() if name not in _NOT_SENT}


async def _read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each complete event; raise ValueError for one that is too large."""
    pending, data = b"", list[bytes]()
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
        if len(pending) + sum(map(len, data)) > _MAX_EVENT:
            raise ValueError(f"an event of more than {_MAX_EVENT} bytes")
