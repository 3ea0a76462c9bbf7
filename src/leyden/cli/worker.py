"""`leyden worker`: runs a configuration's agent for a remote server, on this machine or on a Ray cluster."""

import argparse
import asyncio
import logging
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from leyden.api.client import RemoteError, RetryingRemote, read_key
from leyden.api.wire import FinishRequest
from leyden.background import stop_signal
from leyden.cli.arguments import integer, url
from leyden.cli.printing import plural
from leyden.cli.train import add_configuration, add_ray, configuration
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.ray_cluster import RayWorkers
from leyden.client.worker.worker import work
from leyden.config import ConfigError
from leyden.local.notes import print_note, stderr_console
from leyden.local.worker_process import worker_options
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.outcomes import MEANING
from leyden.process.ray_cluster import ClusterError, connected
from leyden.records import RewardKind


def add_worker(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden worker`."""
    add_configuration(command)
    command.add_argument(
        "--server", metavar="URL", type=url, default=os.environ.get("LEYDEN_URL"), help="the server (or set LEYDEN_URL)"
    )
    command.add_argument("--key-file", type=Path, metavar="FILE", help="a file with a worker key (or set LEYDEN_KEY)")
    command.add_argument(
        "--processes", type=integer(1, 1000), metavar="N", help="processes that run agents (default: workers.processes)"
    )
    add_ray(command, "keep a worker on every node of a Ray cluster").add_argument(
        "--ray-cpus", metavar="N", type=integer(0, 1000), default=1, help="CPUs that each worker reserves (default: 1)"
    )
    command.set_defaults(run=_run)


class WorkerProgress:
    """Counts the attempts that a worker has reported, and shows them in one line on a terminal."""

    def __init__(self, failure_reward: float) -> None:
        self._line, self._failure_reward = ProgressLine(stderr_console()), failure_reward
        self._endings: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._line.show(str(self))

    def count(self, report: FinishRequest) -> None:
        """Count an attempt."""
        self._endings[report.outcome.ending.replace("_", " ")] += 1
        if MEANING[report.outcome.ending].reward == "failure_reward":
            self._rewards.append(self._failure_reward)
        elif parts := [one.weight * one.value for one in report.rewards if one.kind is RewardKind.FINAL]:
            self._rewards.append(sum(parts))
        self._line.show(str(self))

    def close(self) -> None:
        """Remove the line."""
        self._line.close()

    def __str__(self) -> str:
        endings = ", ".join(f"{count} {ending}" for ending, count in self._endings.most_common())
        reward = f", mean reward {fmean(self._rewards):.3f}" if self._rewards else ""
        return f"{plural(self._endings.total(), 'attempt')}{f': {endings}{reward}' if endings else ''}"


async def _run(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.processes:
        options.settings.append(f"workers.processes={options.processes}")
    config = configuration(options)
    if options.server is None:
        raise ConfigError("no server: name it with --server URL")
    key = read_key(options.key_file) if options.key_file else os.environ.pop("LEYDEN_KEY", "")
    if not key:
        raise ConfigError("a worker needs a key: name its file with --key-file, or set LEYDEN_KEY")
    worker = worker_options(config, options.server, config.run, key_file=options.key_file)
    noting = asyncio.create_task(_note_missing_run(worker, config.run, key))
    try:
        if options.ray:
            await _work_on_cluster(worker, key, options)
        else:
            await _work_here(worker, config.run, key)
    finally:
        noting.cancel()


async def _work_here(worker: WorkerOptions, run: str, key: str) -> None:
    stop, progress = stop_signal(), WorkerProgress(worker.rollout.failure_reward)
    print_note(f"working for run {run} at {worker.server}: up to {worker.concurrency} rollouts at once")
    try:
        await work(worker, key, stop, progress.count)
    finally:
        progress.close()
    print_note(f"{'stopped' if stop.is_set() else f'run {run} is done'}: {progress}")


async def _note_missing_run(worker: WorkerOptions, run: str, key: str) -> None:
    """Say for what the worker waits if its server has no such run yet. What the server refuses, the worker reports."""
    with suppress(RemoteError):
        async with RetryingRemote(worker.server, key, lambda _: None) as client:
            if not (await client.run_exists(run)).exists:
                print_note(
                    f"waiting for run {run}, which the server at {worker.server} does not have: start its "
                    "training there, or name another run with run=NAME (`leyden runs` lists those of a server)"
                )


async def _work_on_cluster(worker: WorkerOptions, key: str, options: argparse.Namespace) -> None:
    logging.getLogger("leyden.cluster").setLevel(logging.INFO)
    try:
        with connected(options.ray_address) as ray:
            stop = stop_signal()  # after Ray, which installs its own handler
            await RayWorkers(ray, worker, key, options.ray_cpus).run(stop)
    except ClusterError as error:
        raise ConfigError(str(error)) from error
