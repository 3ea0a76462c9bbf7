"""Kills processes that outlive a killed worker: `python orphan_reaper.py FD MARK`.

Host processes end when their worker is gone, except one whose code lets no other thread run. The reaper is a process
that outlives the worker. It finds the hosts and their descendants by a variable in their environment, and kills those
that do not end in time. It imports nothing of Leyden, so that it starts fast. FD is a pipe that closes with the worker.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "LEYDEN_HOST"
"""Set in every host process; its value starts with the mark of the worker."""
_EXIT_TIMEOUT_S, _POLL_S = 6.0, 0.05


class OrphanReaper:
    """The reaper of this process, from here to `close`."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        child_end, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(child_end), self.mark],
            pass_fds=[child_end],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_end)

    def close(self) -> None:
        """Wait until no marked process is left and the reaper has ended."""
        os.close(self._lifeline)
        self._process.wait()


def _find_marked(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def main(lifeline: int, mark: str) -> None:
    """Wait until the worker has ended and then until its hosts have; after a timeout, kill them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(lifeline, 1):
        pass
    worker_ended = time.monotonic()
    while pids := _find_marked(f"{MARK_VARIABLE}={mark}".encode()):
        if time.monotonic() - worker_ended > _EXIT_TIMEOUT_S:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
