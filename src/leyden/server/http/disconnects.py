"""Cancels the handling of a request when its client disconnects."""

import asyncio
from types import TracebackType

from starlette.types import Message, Receive


class CancelOnDisconnect:
    """A context whose task is cancelled when the client disconnects; the cancellation ends with the context.

    The body must have been read: the only message after it is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self._disconnected = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._receiving: asyncio.Future[Message] = asyncio.ensure_future(self._receive())
        self._receiving.add_done_callback(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        self._receiving.cancel()
        if not self._disconnected or task is None:
            return False
        return task.uncancel() == 0 and kind is asyncio.CancelledError

    def _cancel(self, _: object) -> None:
        if self._task is not None:
            self._disconnected = True
            self._task.cancel()
