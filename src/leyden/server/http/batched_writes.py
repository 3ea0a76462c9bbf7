"""A transport that sends with one system call what is written in one iteration of the event loop."""

import asyncio
from typing import Any

_MAX_BATCH = 64 * 1024


class BatchedTransport(asyncio.Transport):
    """Wraps a transport. The head and the body of a response then leave together.

    A write of a few bytes costs as much as all the code that handles a short request. More than 64 KiB are passed on at
    once, so that the wrapped transport can pause the writer.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._batch: list[Any] = []
        self._size = 0

    def write(self, data: Any) -> None:
        """Send data with what else is written in this iteration."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(data)
        self._size += len(data)
        if self._size > _MAX_BATCH:
            self._flush()

    def close(self) -> None:
        """Send what was written and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection."""
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        batch, self._batch, self._size = self._batch, [], 0
        if batch and not self._transport.is_closing():
            self._transport.write(b"".join(batch))
