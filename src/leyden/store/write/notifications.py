"""Notifies subscribers and waiters of committed events, so that nothing polls the database."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from leyden.records import Event

_log = logging.getLogger("leyden.store")


class Notifications:
    """Passes each committed event to its listeners, on the event loop, in the order of the log."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []
        self._listeners: dict[str | None, dict[asyncio.Event, str]] = {}
        self._closed = False

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call a function for every event from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call a function no more."""
        self._subscribers.remove(subscriber)

    @contextmanager
    def listen(self, run: str | None, kind: str = "") -> Iterator[asyncio.Event]:
        """Yield an `asyncio.Event` that the next event of a run (or of any run) and kind (or any kind) sets.

        Listen first and query second, so that no event in between is missed.
        """
        woken = asyncio.Event()
        if self._closed:
            woken.set()
        listeners = self._listeners.setdefault(run, {})
        listeners[woken] = kind
        try:
            yield woken
        finally:
            del listeners[woken]
            if not listeners and self._listeners.get(run) is listeners:
                del self._listeners[run]

    def publish(self, events: Iterable[Event]) -> None:
        """Notify subscribers and listeners. A subscriber that fails is logged; the others are still notified."""
        for event in events:
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception:  # it must not keep the callers of a committed transaction waiting
                    _log.exception("a subscriber failed on the event %s of %s", event.kind, event.subject)
            for run in (event.run, None):
                for woken, kind in self._listeners.get(run, {}).items():
                    if kind in ("", event.kind):
                        woken.set()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Wake all listeners, present and future."""
        self._closed = True
        for listeners in self._listeners.values():
            for woken in listeners:
                woken.set()
