"""Finds and kills the descendants of this process, including those that left its process group.

On Linux a process can adopt its orphaned descendants, so that every one of them is a child of a known process.
Elsewhere only process groups are killed.
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

_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_POLL_S, _MAX_ROUNDS = 0.01, 100


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that forked it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def prefer_for_oom_kill() -> None:
    """Have the kernel kill this process and its children before worker and server where memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


async def kill_marked(mark: bytes, keep: Callable[[], Collection[int]] = frozenset) -> None:
    """Kill the children that have `mark` in their environment, and their orphans, except the pids in `keep`."""
    killed: set[int] = set()
    childless: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        candidates = [pid for pid in _children() if pid not in keep() and pid not in killed]
        found = {pid for pid in candidates if _has_mark(pid, mark)}
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        dying = {pid for pid in candidates if pid not in found and pid not in childless and _is_dying(pid)}
        if not found and not killed and not dying:
            return
        killed = {pid for pid in killed | found if not _reap(pid)}
        childless |= {pid for pid in dying if _has_ended(pid)}
        await asyncio.sleep(_POLL_S)  # then check again: processes that end leave orphans, which are adopted


def reap_orphans(keep: Collection[int]) -> None:
    """Reap adopted children that have ended, except the pids in `keep`, which others wait for."""
    for pid in _children():
        if pid not in keep:
            _reap(pid)


def kill_descendants() -> None:
    """Kill every descendant. Call it only right before this process ends."""
    for _ in range(_MAX_ROUNDS):
        children = _children()
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)
        if not children:
            return
        time.sleep(_POLL_S)


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _is_dying(pid: int) -> bool:
    """Whether its memory is freed, and with it its environment: its children may not be orphans yet."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return True


def _has_ended(pid: int) -> bool:
    """Whether it is a zombie, or reaped already."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(pid: int) -> bool:
    """Reap a child if it has ended; whether it is gone."""
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
