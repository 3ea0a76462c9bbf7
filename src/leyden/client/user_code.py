"""Calling somebody's code so that nothing here waits for it: in a thread that may never return, or on a loop apart."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import Any

Loop = asyncio.AbstractEventLoop


@cache
def loop_apart() -> Loop:
    """The event loop for async code of a user's in a process that must not be blocked by it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="apart", daemon=True).start()
    return loop


async def on_loop(value: Awaitable[Any], loop: Loop | None) -> Any:
    """Await something outside of any attempt, on this loop (None) or on another."""
    if loop is None:
        given, error = await asyncio.get_running_loop().create_task(_settle(value), context=contextvars.Context())
    else:
        given, error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_settle(value), loop))
    if error is not None:
        raise error
    return given


async def in_thread(call: Callable[[], Any], loop: Loop | None = None) -> Any:
    """What a call gives, from a thread of its own and outside of any attempt; awaited where it is awaitable."""
    here = asyncio.get_running_loop()
    returned: asyncio.Future[tuple[Any, BaseException | None]] = here.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not returned.done():
            returned.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = contextvars.Context().run(call)
        except BaseException as raised:  # told to whoever waits
            error = raised
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            here.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    value, error = await returned
    if error is not None:
        raise error
    return await on_loop(value, loop) if inspect.isawaitable(value) else value


async def _settle(value: Awaitable[Any]) -> tuple[Any, SystemExit | None]:
    """What it gives, or that it exits: raised within a task, that would end the loop."""
    try:
        return await value, None
    except SystemExit as error:
        return None, error
