"""A command that ends with whoever started it: `python -m leyden.client.processes.lifeline FD PROGRAM ARGUMENT...`.

FD is a pipe that the other side never writes to. When it closes, the command and all that it started are asked to end,
and then ended; where this process is killed itself, the kernel ends the command.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from leyden.client.processes.descendants import adopt_orphans, die_with_parent, end_all

_GRACE_S = 3.0


def main(lifeline: int, words: list[str]) -> NoReturn:
    """Run the command; its exit status is this process's, 128 and the signal where it was killed."""
    os.set_inheritable(lifeline, False)
    adopt_orphans()
    command = subprocess.Popen(words, start_new_session=True, preexec_fn=die_with_parent)  # safe: there is one thread
    threading.Thread(target=_end_with, args=(lifeline, command), daemon=True).start()
    status = command.wait()
    end_all()
    os._exit(status if status >= 0 else 128 - status)


def _end_with(lifeline: int, command: "subprocess.Popen[bytes]") -> None:
    while os.read(lifeline, 1):
        pass
    with suppress(OSError):
        os.killpg(command.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        command.wait(_GRACE_S)
    end_all()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
