"""The processes that descend from this one, and how none of them is left behind, not even one that left its group.

On Linux a process adopts the orphans among its descendants, so that each is a child of somebody who is known; elsewhere
there are only process groups.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of Linux's prctl
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_PAUSE_S, _ROUNDS = 0.01, 100


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if _libc is not None:
        _libc.prctl(_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends."""
    if _libc is not None:
        _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def die_first() -> None:
    """Where memory runs out, have the kernel end this process and its children rather than worker or server."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


async def end_marked(mark: bytes, known: Callable[[], Collection[int]] = frozenset) -> None:
    """End the children that have `mark` in their environment, and what they leave behind, but for those `known`."""
    ended: set[int] = set()
    childless: set[int] = set()
    for _ in range(_ROUNDS):
        strangers = [pid for pid in _children() if pid not in known() and pid not in ended]
        found = {pid for pid in strangers if _has(pid, mark)}
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        dying = {pid for pid in strangers if pid not in found and pid not in childless and _is_dying(pid)}
        if not found and not ended and not dying:
            return
        ended = {pid for pid in ended | found if not _bury(pid)}
        childless |= {pid for pid in dying if _has_ended(pid)}
        await asyncio.sleep(_PAUSE_S)  # and look again, for what left its children did so after the look


def bury(known: Collection[int]) -> None:
    """Let go of the adopted that have ended by themselves; nobody else waits for any child but those `known`."""
    for pid in _children():
        if pid not in known:
            _bury(pid)


def end_all() -> None:
    """End every descendant, for this process ends too."""
    for _ in range(_ROUNDS):
        children = _children()
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            _bury(pid)
        if not children:
            return
        time.sleep(_PAUSE_S)


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _is_dying(pid: int) -> bool:
    """Whether its memory is gone, and with it the environment, for then its children may not be orphans yet."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return True


def _has_ended(pid: int) -> bool:
    """Whether it waits to be buried, by whoever does."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _bury(pid: int) -> bool:
    """Whether it has ended, and is gone for good."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return found
