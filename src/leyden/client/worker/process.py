"""A worker as a child of whoever trains: it ends when it is told to, and never outlives the process that started it."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from leyden.client.worker.worker import WorkerOptions


class WorkerProcess:
    """A started worker. Keep this: the worker ends when it goes, or when this process does, however it does."""

    def __init__(self, options: WorkerOptions, key: str, log: Path | None = None) -> None:
        """What it and its agents print is added to `log`, or goes where this process's output goes."""
        self._lifeline: int | None = None
        output = log.open("ab") if log is not None else None
        parents, self._lifeline = os.pipe()
        os.write(self._lifeline, f"{key}\n".encode())  # not by the environment, which agents of the same user can read
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "leyden.client.worker"),
                    *(msgspec.json.encode(options).decode(), str(parents)),
                ],
                pass_fds=[parents],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the one who trains, who may need its rollouts yet
            )
        finally:
            os.close(parents)
            if output is not None:
                output.close()

    def stop(self) -> None:
        """Tell it to finish what it is at, for its grace time; `process.wait()` waits for that."""
        self.process.terminate()

    def end(self) -> None:
        """Have it end at once, with its hosts; what it was at is tried again when its leases run out."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __del__(self) -> None:
        self.end()
