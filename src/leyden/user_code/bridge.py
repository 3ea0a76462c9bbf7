"""The bridge between sync and async code: runs user code, sync or async, without blocking the caller's event loop.

From async code: `call_in_thread` and `await_on`. From sync code: `wait_on` and `run_to_completion`.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

Loop = asyncio.AbstractEventLoop


@cache
def background_loop() -> Loop:
    """Return the event loop, in its own thread, for async user code that must not block the main loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-code", daemon=True).start()
    return loop


async def await_on(value: Awaitable[Any], loop: Loop | None) -> Any:
    """Await on another loop, or on the running one (None), outside the context of any attempt."""
    if loop is None:
        task = asyncio.get_running_loop().create_task(_catch_exit(value), context=contextvars.Context())
        return _unwrap(*await task)
    return _unwrap(*await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_catch_exit(value), loop)))


async def call_in_thread(call: Callable[[], Any], loop: Loop | None = None) -> Any:
    """Call a function in a new thread, outside the context of any attempt, and return its value.

    The thread is a daemon, so that a call that never returns does not keep the process alive. An awaitable value is
    awaited on `loop`.
    """
    here = asyncio.get_running_loop()
    returned: asyncio.Future[tuple[Any, BaseException | None]] = here.create_future()

    def resolve(value: Any, error: BaseException | None) -> None:
        if not returned.done():
            returned.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = contextvars.Context().run(call)
        except BaseException as raised:  # raised again in the caller
            error = raised
        with suppress(RuntimeError):  # the caller's loop is closed
            here.call_soon_threadsafe(resolve, value, error)

    threading.Thread(target=run, daemon=True).start()
    value = _unwrap(*await returned)
    return await await_on(value, loop) if inspect.isawaitable(value) else value


def wait_on(value: Awaitable[T], loop: Loop | None) -> T:
    """Block this thread until a value is awaited on `loop`; on a new loop in this thread if it is None."""
    work = _catch_exit(value)
    result: T = _unwrap(*(asyncio.run(work) if loop is None else asyncio.run_coroutine_threadsafe(work, loop).result()))
    return result


def run_to_completion(work: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run) -> T:
    """Run a coroutine from sync code; in a thread if this one already has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(work)
    threads = ThreadPoolExecutor(1, thread_name_prefix="leyden")
    try:
        return threads.submit(run, work).result()
    finally:
        threads.shutdown(wait=False)  # Ctrl-C reaches the caller at once


async def _catch_exit(value: Awaitable[Any]) -> tuple[Any, SystemExit | None]:
    """Return a SystemExit rather than raise it: raised within a task, it would end the whole loop."""
    try:
        return await value, None
    except SystemExit as error:
        return None, error


def _unwrap(value: Any, error: BaseException | None) -> Any:
    if error is not None:
        raise error
    return value
