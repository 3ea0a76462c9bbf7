"""The worker process: `python -m leyden.client.worker OPTIONS LIFELINE`. Its key arrives through the lifeline pipe."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import uvloop

from leyden.client.processes.descendants import adopt_orphans
from leyden.client.worker.worker import WorkerOptions, work
from leyden.descriptors import raise_file_limit
from leyden.loading import LoadError
from leyden.remote import RemoteError


def main() -> int:
    """Work until a signal says to stop: the first lets attempts finish for a while, the second does not."""
    parser = argparse.ArgumentParser(prog="python -m leyden.client.worker", description=__doc__)
    parser.add_argument("options", help="the worker's options as JSON, or a file with them")
    parser.add_argument("lifeline", type=int, help="a pipe with its key in it; when it closes the worker ends")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.set_inheritable(arguments.lifeline, False)
    key = b"".join(iter(lambda: os.read(arguments.lifeline, 1).strip(b"\n"), b"")).decode()
    adopt_orphans()
    raise_file_limit()
    threading.Thread(target=_die_with, args=(arguments.lifeline,), daemon=True).start()
    try:
        uvloop.run(_work(_options(arguments.options), key))
    except (LoadError, RemoteError, msgspec.ValidationError) as error:
        sys.stderr.write(f"leyden worker: {error}\n")
        return 2
    return 0


def _options(text: str) -> WorkerOptions:
    data = text if text.lstrip().startswith("{") else Path(text).read_bytes()
    return msgspec.json.decode(data, type=WorkerOptions)


async def _work(options: WorkerOptions, key: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear, number)
    await work(options, key, stop)


def _die_with(parent: int) -> None:
    """Whoever started this worker is gone: so is the worker, and its hosts with it."""
    while os.read(parent, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a reward function may be stuck in its thread for ever
