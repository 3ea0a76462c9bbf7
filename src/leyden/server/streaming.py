"""Streamed responses that keep idle event streams open with comments and always close their source."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Send

from leyden.server.content import media_type

EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE_S = 15.0
_COMMENT = b": waiting\n\n"


class StreamResponse(StreamingResponse):
    """Sends chunks as they arrive, and stops the generator when the client disconnects.

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
        self._keep_alive_s = _KEEP_ALIVE_S if media_type(content_type) == EVENT_STREAM else None

    async def stream_response(self, send: Send) -> None:
        """Send the chunks; the generator is closed afterwards, however this ends."""
        async with aclosing(_kept_alive(self._chunks, self._keep_alive_s)) as self.body_iterator:
            await super().stream_response(send)


async def _kept_alive(chunks: AsyncGenerator[bytes, None], interval_s: float | None) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, and a comment whenever none arrived for `interval_s` seconds."""
    upcoming = asyncio.ensure_future(anext(chunks, None))
    try:
        while True:
            await asyncio.wait((upcoming,), timeout=interval_s)
            if not upcoming.done():
                yield _COMMENT
                continue
            chunk = upcoming.result()
            if chunk is None:
                return
            yield chunk
            upcoming = asyncio.ensure_future(anext(chunks, None))
    finally:
        upcoming.cancel()
        with anyio.CancelScope(
            shield=True
        ):  # Starlette cancels again at every await; the generator has calls to record
            await asyncio.gather(upcoming, return_exceptions=True)
            await chunks.aclose()
