"""Tells whether a process still works on the run of a folder, and names the rollouts that nobody finishes."""

import fcntl
from collections.abc import Mapping
from pathlib import Path

LOCK_NAME = "lock"
INTERRUPTED = "interrupted"
"""The state that is shown for open rollouts of a run that no process holds."""


def is_run_held(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run's folder; None if the folder has no lock, as that of a server."""
    try:
        with (folder / LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def count_interrupted(states: Mapping[str, int], held: bool | None) -> dict[str, int]:
    """Return counts of rollouts by state, in which open ones are interrupted if no process holds the run."""
    open_count = states.get("running", 0) + states.get("queued", 0)
    if held is not False or not open_count:
        return dict(states)
    ended = {state: count for state, count in states.items() if state not in ("running", "queued")}
    return {**ended, INTERRUPTED: open_count}
