"""Runs a command that ends with its parent: `python -m leyden.client.processes.lifeline FD PROGRAM ARGUMENT...`.

FD is the read end of a pipe. When the parent closes it or dies, the command and its descendants are terminated and then
killed. If this process is killed, the kernel kills the command.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from leyden.client.processes.descendants import adopt_orphans, die_with_parent, kill_descendants

_TERM_TIMEOUT_S = 3.0


def main(lifeline: int, command: list[str]) -> NoReturn:
    """Run the command and exit with its status; 128 plus the signal number where it was killed."""
    os.set_inheritable(lifeline, False)
    adopt_orphans()
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)  # safe: there is one thread
    threading.Thread(target=_stop_when_closed, args=(lifeline, process), daemon=True).start()
    status = process.wait()
    kill_descendants()
    os._exit(status if status >= 0 else 128 - status)


def _stop_when_closed(lifeline: int, process: "subprocess.Popen[bytes]") -> None:
    while os.read(lifeline, 1):
        pass
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_TIMEOUT_S)
    kill_descendants()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
