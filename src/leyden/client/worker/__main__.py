"""The worker process: `python -m leyden.client.worker`. It reads its key and its options from standard input.

They are not on its command line, which every user of the machine can read: an agent's command or URL may have a secret.
The worker ends when standard input closes.
"""

import asyncio
import logging
import os
import signal
import sys
import threading

import msgspec
import uvloop

from leyden.api.client import RemoteError
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import work
from leyden.process.resources import raise_file_limit
from leyden.user_code.loading import LoadError, add_current_folder


def main() -> int:
    """Work until a signal. The first lets attempts finish within the grace time; the second ends the process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # code of the user and its children find standard input empty
    key, options = _read_lines(lifeline)
    raise_file_limit()
    add_current_folder()
    threading.Thread(target=_exit_when_closed, args=(lifeline,), daemon=True).start()
    try:
        uvloop.run(_work(msgspec.json.decode(options, type=WorkerOptions), key.decode()))
    except (LoadError, RemoteError, msgspec.ValidationError) as error:
        sys.stderr.write(f"leyden worker: {error}\n")
        return 2
    return 0


def _read_lines(lifeline: int) -> tuple[bytes, bytes]:
    """Read two lines, which are all that is written to the pipe. Ends this process if the parent is gone."""
    read = b""
    while read.count(b"\n") < 2:
        if not (data := os.read(lifeline, 1 << 16)):
            os._exit(1)
        read += data
    key, options, _ = read.split(b"\n")
    return key, options


async def _work(options: WorkerOptions, key: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await work(options, key, stop)


def _exit_when_closed(lifeline: int) -> None:
    """End this process when the parent is gone. Its host processes end with it."""
    while os.read(lifeline, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a reward function may be stuck in its thread
