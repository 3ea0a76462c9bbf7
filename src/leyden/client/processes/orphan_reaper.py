"""What is left when a worker is killed: a process of its own that outlives the worker and ends what does not end.

Hosts end by themselves when their worker is gone, but one whose code never lets another thread run cannot. The warden
knows them, and whatever they started, by a variable in their environment. It imports nothing of Leyden's, so that it
starts at once: `python warden.py FD MARK`, where FD is a pipe that closes with the worker.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "LEYDEN_HOST"
"""Whose value begins with the worker's mark."""
_PATIENCE_S, _PAUSE_S = 6.0, 0.05


class OrphanReaper:
    """The warden of this process, until `close`. Marks of hosts begin with its own."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        ours, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(ours), self.mark],
            pass_fds=[ours],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours)

    def close(self) -> None:
        """Let it go; it ends when it has seen that nothing is left."""
        os.close(self._lifeline)
        self._process.wait()


def _marked(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def main(lifeline: int, mark: str) -> None:
    """Wait for the worker's end, then for that of its hosts, and then wait no longer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(lifeline, 1):
        pass
    gone = time.monotonic()
    while left := _marked(f"{VARIABLE}={mark}".encode()):
        if time.monotonic() - gone > _PATIENCE_S:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
