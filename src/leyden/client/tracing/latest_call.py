"""Which model call is the latest, as seen from where code is running.

An agent may ask several things at once. Every task and thread has a strand, which began on the strand that started it.
A call becomes the latest of its own strand and of all those that this came from, and of none beside them.
"""

import asyncio
import threading
from contextvars import ContextVar


class LatestCall:
    """A task or a thread, as far as it has made calls."""

    __slots__ = ("call", "owner", "parent")

    def __init__(self, parent: "LatestCall | None" = None, owner: int | None = None) -> None:
        self.parent, self.owner = parent, owner
        self.call: str | None = None


current: ContextVar[LatestCall | None] = ContextVar("leyden-strand", default=None)
"""The strand of this context, or the one that it began on: which of the two is seen by the owner."""


def note(call: str) -> None:
    """The answer to a call has come here."""
    owner, strand = _owner(), current.get()
    if strand is None or strand.owner != owner:
        strand = LatestCall(strand, owner)
        current.set(strand)
    seen: LatestCall | None = strand
    while seen is not None:
        seen.call = call
        seen = seen.parent


def latest() -> str | None:
    """The latest call here; where there was none, of the strand that this began on."""
    strand = current.get()
    while strand is not None and strand.call is None:
        strand = strand.parent
    return strand.call if strand is not None else None


def _owner() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return threading.get_ident() if task is None else id(task)
