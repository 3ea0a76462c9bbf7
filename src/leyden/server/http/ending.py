"""Ends the process of a server: when a signal asks for it, and when its event loop is blocked for good.

A signal stops the server gracefully; if that takes more than a minute, the process exits. The kernel kills a process
that used a minute of CPU time while its loop did not run once, whatever it computes and whoever holds the GIL. CPU time
does not pass while the process is stopped or the machine is busy with others or sleeps. Both write to the log what the
server was doing.
"""

import asyncio
import faulthandler
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GRACE_S = 60.0
"""How long a server may take to stop: it gives requests half a minute."""
_BLOCKED_CPU_S = 60.0
_TICK_S = 1.0


@contextmanager
def ending_process(stop: Callable[[], None]) -> Iterator[None]:
    """Within this context of a running loop, SIGINT and SIGTERM call `stop`, and a blocked loop ends the process."""
    loop = asyncio.get_running_loop()
    timer: asyncio.Handle

    def on_signal(*_: object) -> None:  # runs between two instructions, also if the loop is blocked
        faulthandler.dump_traceback_later(_GRACE_S, exit=True)
        loop.call_soon_threadsafe(stop)

    def tick() -> None:
        nonlocal timer
        signal.setitimer(signal.ITIMER_PROF, _BLOCKED_CPU_S)
        timer = loop.call_later(_TICK_S, tick)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    faulthandler.register(signal.SIGPROF, chain=True)
    timer = loop.call_soon(tick)
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
