"""The worker beside a trainer: started with it, started again when it dies, and gone when the trainer is."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from leyden.client.worker.process import WorkerProcess
from leyden.client.worker.worker import WorkerOptions
from leyden.config import Config, ConfigError

_REFUSED = 2
"""The exit status of a worker that cannot work, whatever is tried."""
_QUICKLY_S, _TRIES = 10.0, 5


class LocalWorker:
    """A worker process that is kept alive."""

    def __init__(self, options: WorkerOptions, key: str, log: Path) -> None:
        self._options, self._key, self._log = options, key, log
        self._worker = WorkerProcess(options, key, log)
        self._watching = asyncio.create_task(self._watch())

    async def failed(self) -> NoReturn:
        """Wait until there is no use in starting it again, and say why."""
        await asyncio.shield(self._watching)
        raise AssertionError("only an error ends the watch")

    async def stop(self) -> None:
        """End it at once: whoever trains has all that it asked for, or wants no more of it."""
        self._watching.cancel()
        self._worker.end()
        await asyncio.to_thread(self._worker.process.wait)

    async def _watch(self) -> NoReturn:
        deaths: list[float] = []
        while True:
            status = await asyncio.to_thread(self._worker.process.wait)
            if status == _REFUSED:
                raise ConfigError(self._last_words())
            deaths = [*deaths[-_TRIES + 1 :], time.monotonic()]
            if len(deaths) == _TRIES and deaths[-1] - deaths[0] < _QUICKLY_S:
                raise ConfigError(f"the worker keeps dying (status {status}): {self._last_words()}; see {self._log}")
            self._worker = WorkerProcess(self._options, self._key, self._log)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        return lines[-1].removeprefix("leyden worker: ")


@asynccontextmanager
async def working(options: WorkerOptions, key: str, log: Path) -> AsyncIterator[LocalWorker]:
    """A worker that works within this context."""
    workers = LocalWorker(options, key, log)
    try:
        yield workers
    finally:
        await workers.stop()


def worker_options(config: Config, url: str, run: str) -> WorkerOptions:
    """What the workers of a run are told."""
    return WorkerOptions(
        server=url,
        run=run,
        agent=config.agent,
        reward=config.reward,
        base=config.base,
        processes=max(1, config.workers.processes),
        concurrency=1 if config.deterministic else config.workers.concurrency,
        time_limit_s=config.rollout.time_limit_s,
        reward_time_limit_s=config.rollout.reward_time_limit_s,
        reward_tries=config.rollout.reward_tries,
        services=config.services,
        memory_mb=config.rollout.memory_mb,
        cpu_s=config.rollout.cpu_s,
        drain_s=config.workers.drain_s,
        path=tuple(filter(None, sys.path)),
    )
