"""Runs the worker of a local run in its own process: restarts it when it dies, and stops it with the run."""

import asyncio
import sys
from pathlib import Path

from leyden import defaults
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import REFUSED, WorkerProcess
from leyden.config import Config, ConfigError
from leyden.local.notes import print_note
from leyden.process.guardian import exit_reason
from leyden.process.resources import usable_cores
from leyden.process.rotating_log import RotatingLog
from leyden.process.supervised import SupervisedProcess

_OTHER_CORES = 4
"""Cores that trainer, server and engine keep busy while agents run."""
_MAX_PROCESSES = 16
"""More host processes than this gain little: agents mostly wait for the model."""
_GPU_CONCURRENCY = 256
_MAX_DEATHS, _DEATHS_WITHIN_S = 5, 60.0
"""A worker that dies this often within this time is not restarted."""


class LocalWorker(SupervisedProcess):
    """A worker process."""

    def __init__(self, options: WorkerOptions, key: str, log_file: Path) -> None:
        super().__init__("the worker", _MAX_DEATHS, _DEATHS_WITHIN_S, ConfigError)
        self._options, self._key = options, key
        self._output = RotatingLog(log_file)
        self._worker: WorkerProcess

    async def start(self) -> None:
        """Start the worker; it need not be ready."""
        self._worker = self._launch()
        self._start_supervising()

    async def _end(self) -> None:
        """End the worker at once: the results of its rollouts are no longer needed."""
        await self._worker.end()
        await asyncio.to_thread(self._output.tail)

    def _launch(self) -> WorkerProcess:
        return WorkerProcess(self._options, self._key, self._output)

    async def _wait_ended(self) -> str:
        status = await self._worker.wait()
        if status == REFUSED:
            raise ConfigError(self._last_line())
        return f"the worker ended ({exit_reason(status)}): {self._last_line()} ({self._output.path})"

    async def _restart(self, reason: str) -> None:
        print_note(f"{reason}; it is started again")
        self._worker = self._launch()

    def _last_line(self) -> str:
        return (self._output.last_line() or "it printed nothing").removeprefix("leyden worker: ")


def worker_options(
    config: Config, url: str, run: str, on_gpu: bool = False, key_file: Path | None = None
) -> WorkerOptions:
    """Return the options of a run's worker, from its configuration and this machine; agents do not see `key_file`."""
    processes, concurrency = worker_size(config, usable_cores(), on_gpu)
    return WorkerOptions(
        server=url,
        run=run,
        agent=config.agent,
        reward=config.reward,
        base=config.base,
        processes=processes,
        concurrency=concurrency,
        rollout=config.rollout,
        workers=config.workers,
        services=config.services,
        hidden=tuple(str(path.absolute()) for path in (Path(config.home), key_file) if path is not None),
        path=tuple(filter(None, sys.path)),
    )


def worker_size(config: Config, cores: int, on_gpu: bool = False) -> tuple[int, int]:
    """Return how many processes a worker runs agents in, and how many rollouts at the same time over all of them."""
    if config.deterministic:
        return 1, 1
    processes, concurrency = config.workers.processes or 0, config.workers.concurrency
    if concurrency is None:
        concurrency = max(processes, _GPU_CONCURRENCY if on_gpu else defaults.CONCURRENCY)
    by_cores = max(defaults.WORKER_PROCESSES, min(_MAX_PROCESSES, concurrency, cores - _OTHER_CORES))
    return processes or by_cores, concurrency
