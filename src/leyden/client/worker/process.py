"""Starts a worker as a child process that never outlives its parent."""

import os
import subprocess
import sys
from contextlib import suppress

import msgspec

from leyden.client.worker.worker import WorkerOptions


class WorkerProcess:
    """A worker in a child process. Keep a reference: the worker ends when this object or the parent process goes."""

    def __init__(self, options: WorkerOptions, key: str, output: int | None = None) -> None:
        """Start it. Output of the worker and its agents goes to the descriptor `output`, which is closed here.

        Without one it goes to this process's own.
        """
        self._lifeline: int | None = None
        child_end, lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "leyden.client.worker", str(child_end)],
                pass_fds=[child_end],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal stops the trainer, which may still need its rollouts
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(child_end)
            if output is not None:
                os.close(output)
        self._lifeline = lifeline
        # Agents of the same user could read the environment, and every user the command line.
        message = key.encode() + b"\n" + msgspec.json.encode(options) + b"\n"
        with suppress(BrokenPipeError):  # it has ended already: its exit status says so
            while message:
                message = message[os.write(lifeline, message) :]

    def stop(self) -> None:
        """Let it finish its attempts within the grace time; `process.wait()` waits for its end."""
        self.process.terminate()

    def end(self) -> None:
        """End it at once with its host processes. Its attempts are retried when their leases have expired."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
            self.process.kill()  # one that an agent has stopped does not notice that the pipe is closed

    def __del__(self) -> None:
        self.end()
