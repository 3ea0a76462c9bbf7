"""Streamed responses that keep idle event streams open and always close their source."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leyden.background import start_background
from leyden.server.http.content import media_type

EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE_S = 15.0
_COMMENT = b": waiting\n\n"


class StreamResponse(StreamingResponse):
    """Sends chunks as they arrive, for a route that `waits`. The generator is always closed, before the request ends.

    An event stream without an event for 15 seconds gets a comment, so that no proxy or client closes it.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        content_type: str = EVENT_STREAM,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(chunks, headers={"content-type": content_type, "cache-control": "no-cache", **(headers or {})})
        self._chunks = chunks
        self._idle_since: float | None = time.monotonic()
        """Since when it waits for a chunk; None while it sends one."""
        self._keep_alive_s = _KEEP_ALIVE_S if media_type(content_type) == EVENT_STREAM else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the generator ends. The endpoint cancels this when the client disconnects."""
        commenting: asyncio.Task[None] | None = None
        try:
            async with aclosing(self._chunks):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if self._keep_alive_s is not None:
                    commenting = start_background(self._send_comments(send, self._keep_alive_s), "an idle stream")
                async for chunk in self._chunks:
                    self._idle_since = None
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._idle_since = time.monotonic()
        finally:
            if commenting is not None:
                commenting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send, after_s: float) -> None:
        while True:
            idle_s = 0.0 if self._idle_since is None else time.monotonic() - self._idle_since
            if idle_s < after_s:
                await asyncio.sleep(after_s - idle_s)
                continue
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            self._idle_since = time.monotonic()
