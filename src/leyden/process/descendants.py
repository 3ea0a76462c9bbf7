"""Adopts and kills the descendants of this process, including those that left its session and process group.

On Linux a process can adopt its orphaned descendants, so that every one of them is or becomes its child. Elsewhere only
process groups can be killed.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_POLL_S = 0.005


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the kernel send a signal to this process when the one that forked it ends. Changing the user id undoes it.

    SIGCONT has one that is stopped notice the end.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the name of this process that `ps` and `top` show."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def prefer_for_oom_kill() -> None:
    """Have the kernel kill this process and its children before worker and server if memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def kill_children(timeout_s: float, keep: Collection[int] = ()) -> dict[int, int]:
    """Kill all children but `keep`, and those that they leave; return the wait status of each by pid.

    If this process adopts orphans, no descendant is left, unless the kernel cannot end one within the timeout.
    """
    ended: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while children := [pid for pid in _children() if pid not in keep]:
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            ended |= reap(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)  # a process that ends takes time, and only then are its children adopted
    return ended


def reap(pid: int = -1) -> dict[int, int]:
    """Return the wait status by pid of a child that has ended (-1: of all such children)."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(pid, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def descendants(pid: int | str = "self") -> list[int]:
    """Return the processes that a process has started, those that they have started, and so on."""
    found, waiting = [], _children(pid)
    while waiting:
        found.append(child := waiting.pop())
        waiting += _children(child)
    return found


def is_zombie(pid: int) -> bool:
    """Whether a process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    return True


def _children(pid: int | str = "self") -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
