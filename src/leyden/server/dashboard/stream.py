"""Server-sent events: what changed in which run, at most four times a second, so that pages fetch only that again."""

import asyncio
from asyncio import get_running_loop
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import msgspec

from leyden.records import Event
from leyden.server.dashboard.run_stores import Counts
from leyden.server.dashboard.store_polling import recent_events
from leyden.server.http.responses import Request
from leyden.server.http.streaming import StreamResponse
from leyden.server.service import ServerContext

_INTERVAL_S = 0.25
_MAX_TIMER_S = 30 * 86_400.0
Changes = Counter[tuple[str, str]]
"""How many events there were, by run and kind."""


async def stream_changes(service: ServerContext, request: Request[None, None]) -> StreamResponse:
    """Stream the numbers of new events by run and kind, for as long as the client listens and its key is valid.

    The first message also has the events of the last two seconds, which the client may not have seen.
    """
    valid_s = request.key.expires - service.keyring.clock()
    return StreamResponse(_changes(service, request.path.get("run") or request.key.run, valid_s))


async def _changes(service: ServerContext, run: str | None, valid_s: float) -> AsyncGenerator[bytes, None]:
    notifications, changes = service.store.notifications, Changes()
    loop = get_running_loop()
    expires = loop.time() + valid_s

    def on_event(event: Event) -> None:
        if run in (None, event.run):
            changes[event.run, str(event.kind)] += 1

    notifications.subscribe(on_event)
    with ExitStack() as stack:
        stack.callback(notifications.unsubscribe, on_event)
        yield b"event: open\ndata: {}\n\n"
        with notifications.listen(run) as woken:

            def on_change(counts: Counts) -> None:
                changes.update({key: count for key, count in counts.items() if run in (None, key[0])})
                if changes:
                    woken.set()

            stack.callback(loop.call_later(min(valid_s, _MAX_TIMER_S), woken.set).cancel)
            with service.store_polling.listen(on_change):
                on_change((await service.store.read(recent_events))[1])
                while not notifications.closed and loop.time() < expires:
                    await woken.wait()
                    woken.clear()
                    if changes:
                        message = _message(changes)
                        changes.clear()  # before the message is sent: events that come meanwhile are for the next one
                        yield message
                    await asyncio.sleep(_INTERVAL_S)
                if notifications.closed:
                    yield b"event: end\ndata: " + msgspec.json.encode(sorted(service.ended_runs)) + b"\n\n"


def _message(changes: Changes) -> bytes:
    runs: dict[str, dict[str, int]] = {}
    for (run, kind), count in changes.items():
        runs.setdefault(run, {})[kind] = count
    return b"event: change\ndata: " + msgspec.json.encode(runs) + b"\n\n"
