"""Streamed responses that keep idle event streams open and close their source when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leyden.server.content import media_type

EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE_S = 15.0
_COMMENT = b": waiting\n\n"


class StreamResponse(StreamingResponse):
    """Sends chunks as they arrive. The generator is always closed, and before the request ends.

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the generator ends or the client disconnects.

        Starlette's own handling of a disconnect cancels every await of the generator, also those that record its call.
        """
        async with aclosing(self._until_disconnect(receive)) as self.body_iterator:
            await self.stream_response(send)

    async def _until_disconnect(self, receive: Receive) -> AsyncGenerator[bytes, None]:
        disconnected = asyncio.ensure_future(receive())  # the body was read: the next message is the disconnect
        upcoming = asyncio.ensure_future(anext(self._chunks, None))
        try:
            while True:
                await asyncio.wait(
                    (upcoming, disconnected), timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if disconnected.done():
                    return
                if not upcoming.done():
                    yield _COMMENT
                    continue
                chunk = upcoming.result()
                if chunk is None:
                    return
                yield chunk
                upcoming = asyncio.ensure_future(anext(self._chunks, None))
        finally:
            disconnected.cancel()
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
            await self._chunks.aclose()
