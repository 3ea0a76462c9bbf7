"""Tracks the latest model call of each task and thread, so that a step reward goes to the right call.

An agent may make calls concurrently. Every task and thread has a node whose parent is the node of its creator. A call
becomes the latest call of its node and of all ancestors, but not of concurrent tasks.
"""

import asyncio
import threading
from contextvars import ContextVar


class LatestCall:
    """The latest call of one task or thread."""

    __slots__ = ("call", "owner", "parent")

    def __init__(self, parent: "LatestCall | None" = None, owner: int | None = None) -> None:
        self.parent, self.owner = parent, owner
        self.call: str | None = None


current: ContextVar[LatestCall | None] = ContextVar("leyden-latest-call", default=None)
"""The node of this context, or that of its creator; `owner` tells which."""


def record(call: str) -> None:
    """Set the latest call of the current task or thread."""
    owner, node = _owner(), current.get()
    if node is None or node.owner != owner:
        node = LatestCall(node, owner)
        current.set(node)
    ancestor: LatestCall | None = node
    while ancestor is not None:
        ancestor.call = call
        ancestor = ancestor.parent


def latest() -> str | None:
    """Return the latest call of the current task or thread, or of the nearest ancestor that made one."""
    node = current.get()
    while node is not None and node.call is None:
        node = node.parent
    return node.call if node is not None else None


def _owner() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no running event loop
        task = None
    return threading.get_ident() if task is None else id(task)
