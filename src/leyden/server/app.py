"""The server as an ASGI application: every request finds its route, shows its key, is weighed, and is answered."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from leyden.server.address import is_loopback
from leyden.server.gateway.errors import STATUS, GatewayError
from leyden.server.http import (
    EVENT_STREAM,
    JSON,
    ApiError,
    ErrorBody,
    ErrorDetail,
    Raw,
    Receive,
    Request,
    Route,
    Scope,
    Send,
    Stream,
    Table,
    check_path,
    decode,
    decode_query,
    encode,
    media_type,
    read_body,
)
from leyden.server.keys import Key, KeyKind, KeyRefused, Permission, permit
from leyden.server.limits import TooMany
from leyden.server.routes import ROUTES
from leyden.server.service import ServerContext
from leyden.store.errors import Conflict, NotFound, NotStorable, StoreUnavailable

_KEEP_OPEN_S = 15.0
_log = logging.getLogger("leyden.server")
_ANYBODY = Key(KeyKind.VIEWER, "anybody", float("inf"))
_KEYLESS = Key(KeyKind.ADMIN, "keyless", float("inf"))


class App:
    """The application."""

    def __init__(self, service: ServerContext) -> None:
        self.service = service
        self._table = Table(ROUTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"Leyden serves HTTP, not {scope['type']}")
        began = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name, extra, route = "none", [], None
        body: bytes | Stream
        try:
            route, path = self._table.find(scope["method"], scope["path"])
            name = route.path
            answer = await self._answer(route, path, scope, headers, receive)
            status = 200 if route.returns is not None else 204
            body, content_type = _written(answer, headers.get("accept", ""))
            extra = list(answer.headers) if isinstance(answer, Raw | Stream) else []
        except Exception as error:
            refusal = _refusal(error)
            status, extra, content_type = refusal.status, list(refusal.headers), JSON
            body = _error_body(route, refusal)
            if status < 500:
                self.service.telemetry.refused.labels(refusal.reason).inc()
            else:
                _log.exception("%s %s failed", scope["method"], scope["path"], exc_info=error)
        if isinstance(body, Stream):
            await _send_stream(send, receive, body)
        else:
            await _send(send, status, body, content_type, extra)
        self.service.telemetry.answered(name, status, time.perf_counter() - began)

    async def _answer(
        self, route: Route, path: dict[str, str], scope: Scope, headers: dict[str, str], receive: Receive
    ) -> Any:
        key = _ANYBODY if route.act is None else self._key(route.act, path, headers)
        with ExitStack() as admitted:
            if key is not _ANYBODY:
                admitted.enter_context(self.service.limiter.admit(key.kind, key.id))
            check_path(path)
            query = decode_query(scope["query_string"], route.query)
            body: Any = None
            if route.body is not None:
                data = await read_body(receive, headers, self.service.settings.max_body)
                content_type = headers.get("content-type", "")
                body = Raw(data, content_type) if route.body is Raw else decode(data, content_type, route.body)
            request: Request[Any, Any] = Request(path, query, body, key, headers)
            if not route.waits:
                return await route.handler(self.service, request)
            if route.body is None:
                await read_body(receive, headers, self.service.settings.max_body)
            answer = await _while_connected(route.handler(self.service, request), receive)
            if isinstance(answer, Stream):  # it counts as one of the key's requests until it ends
                return replace(answer, chunks=_until(answer.chunks, admitted.pop_all()))
            return answer

    def _key(self, act: Permission, path: dict[str, str], headers: dict[str, str]) -> Key:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        text = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not text:
            if self.service.settings.keyless and _from_here(headers):
                return _KEYLESS
            raise KeyRefused(401, "invalid_api_key", "no key: send one as `Authorization: Bearer ...`")
        key = self.service.keyring.read(text)
        permit(key, act, self.service.leases, run=path.get("run"), attempt=path.get("attempt"))
        return key


def _from_here(headers: dict[str, str]) -> bool:
    """Whether a request was meant for loopback, and not sent by a page of another site that a browser shows."""
    asked, origin = headers.get("host", ""), headers.get("origin")
    return is_loopback(urlsplit(f"//{asked}").hostname) and (origin is None or is_loopback(urlsplit(origin).hostname))


async def _while_connected(work: Any, receive: Receive) -> Any:
    """Await work, and cancel it when the caller hangs up."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())  # the body is read: all that can come is the disconnect
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "disconnected", "the caller hung up")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


def _written(answer: Any, accept: str) -> tuple[bytes | Stream, str]:
    if answer is None:
        return b"", JSON
    if isinstance(answer, Stream):
        return answer, answer.content_type
    return (answer.content, answer.content_type) if isinstance(answer, Raw) else encode(answer, accept)


async def _until(chunks: AsyncGenerator[bytes, None], admitted: ExitStack) -> AsyncGenerator[bytes, None]:
    with admitted:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk


def _error_body(route: Route | None, refusal: ApiError) -> bytes:
    if route is not None and route.error is not None:
        return route.error(refusal)
    return encode(ErrorBody(ErrorDetail(refusal.reason, refusal.message, refusal.field)), JSON)[0]


def _refusal(error: Exception) -> ApiError:
    match error:
        case GatewayError():
            wait = [("retry-after", str(max(1, round(error.retry_after))))] if error.retry_after else []
            return ApiError(STATUS[error.kind], str(error.kind), error.message, error.param, wait)
        case ApiError():
            return error
        case KeyRefused():
            challenge = [("www-authenticate", "Bearer")] if error.status == 401 else []
            return ApiError(error.status, error.reason, error.message, headers=challenge)
        case TooMany():
            wait = [("retry-after", str(max(1, round(error.retry_after))))]
            return ApiError(429, "rate_limit", f"{error}: come again in {error.retry_after:.3g} s", headers=wait)
        case NotFound():
            return ApiError(404, "not_found", str(error))
        case Conflict():
            return ApiError(409, "conflict", str(error))
        case NotStorable():
            return ApiError(400, "invalid_request", str(error))
        case StoreUnavailable():
            return ApiError(503, "store_unavailable", str(error), headers=[("retry-after", "1")])
        case _:
            return ApiError(500, "server_error", "the server failed; its log says how")


async def _send(send: Send, status: int, body: bytes, content_type: str, extra: list[tuple[str, str]]) -> None:
    headers = [(name.encode(), value.encode()) for name, value in extra]
    if status != 204:
        headers += [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(send: Send, receive: Receive, stream: Stream) -> None:
    """Send pieces as they come, comments while no event does, and stop when the caller hangs up."""
    headers = [(b"content-type", stream.content_type.encode()), (b"cache-control", b"no-cache")]
    headers += [(name.encode(), value.encode()) for name, value in stream.headers]
    quiet_s = _KEEP_OPEN_S if media_type(stream.content_type) == EVENT_STREAM else None
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    gone = asyncio.ensure_future(receive())
    coming = asyncio.ensure_future(anext(stream.chunks, None))
    try:
        while True:
            await asyncio.wait((coming, gone), timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if not coming.done():
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                continue
            chunk = coming.result()
            if chunk is None:
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            coming = asyncio.ensure_future(anext(stream.chunks, None))
    finally:
        gone.cancel()
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await stream.chunks.aclose()
