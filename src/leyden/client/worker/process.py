"""Starts a worker as a child process that never outlives its parent."""

import msgspec

from leyden.client.worker.options import WorkerOptions
from leyden.process.child import ChildProcess, module_command
from leyden.process.place import HERE, Place
from leyden.process.rotating_log import RotatingLog

REFUSED = 2
"""The exit status of a worker that cannot run with these options, so that restarting it is useless."""


class WorkerProcess(ChildProcess):
    """A worker in a child process. Keep a reference: the worker ends when this object or the parent process goes.

    `end` ends it at once with its host processes: its attempts are retried when their leases have expired.
    """

    def __init__(self, options: WorkerOptions, key: str, log: RotatingLog | None = None, place: Place = HERE) -> None:
        """Start it. Output of the worker and its agents goes to `log`, or to this process's own."""
        super().__init__(module_command("leyden.client.worker"), log=log, place=place)
        # Agents of the same user could read the environment, and every user the command line.
        self.send(key.encode() + b"\n" + msgspec.json.encode(options) + b"\n")

    def stop(self) -> None:
        """Let it finish its attempts within the grace time; `wait` waits for its end."""
        self.process.terminate()
