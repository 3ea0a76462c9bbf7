"""`leyden train`: starts or resumes a run and trains until its last step."""

import asyncio
import json
import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from msgspec.structs import replace

from leyden import __version__
from leyden.config import Config, ConfigError, policy_configs
from leyden.episodes import Episode
from leyden.learner.errors import RankLost
from leyden.learner.loading import check_tokenizer
from leyden.learner.objective import objective_of
from leyden.learner.protocol import TrainerState
from leyden.local.cluster import RayCluster
from leyden.local.learner import open_learner
from leyden.local.learning_rate import with_learning_rates
from leyden.local.notes import notes_logged, print_note, stderr_console
from leyden.local.readable import Readable
from leyden.local.stack import local_stack, run_with
from leyden.models.source import find_model
from leyden.orchestrator.algorithm.resolve import Algorithm, algorithms_of
from leyden.orchestrator.health.standstill import StandstillDetector
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.orchestrator.report.console import ConsoleReport
from leyden.orchestrator.report.metrics_log import MetricsLog, read_metrics
from leyden.orchestrator.report.plot import draw_image, draw_text, metric_points
from leyden.orchestrator.report.sinks import opened_sinks
from leyden.orchestrator.report.time_summary import time_summary
from leyden.orchestrator.rollouts.tasks import Tasks, read_tasks
from leyden.process.ray_cluster import ClusterError, connected
from leyden.process.resources import usable_cores
from leyden.records import DEFAULT_POLICY
from leyden.rl.registry import unused_settings
from leyden.runs.checkpoint_files import latest_checkpoint
from leyden.runs.run_folder import RunFolder
from leyden.runs.run_names import STORE_NAME
from leyden.store.database import Database
from leyden.store.read import queries

States = Mapping[str, TrainerState]
"""By policy."""
_PACKAGES = ("torch", "transformers", "tokenizers", "renderers", "peft", "vllm", "openai", "anthropic", "sqlalchemy")
"""Whose versions a run records."""


class TrainingResult(Readable, frozen=True):
    """The result of `leyden.train`."""

    run: str
    folder: Path
    step: int
    steps: int
    before: float | None
    """Held-out reward before the first step."""
    after: float | None
    """Held-out reward of the last evaluation after a step; None if there was none."""
    best_step: int | None
    """Step with the highest held-out reward; 0 is the model before training."""
    seconds: float
    """The duration of this process; earlier processes of a resumed run are not counted."""
    best: float | None = None
    """Held-out reward of the best step. It is optimistic, because the step was chosen by it."""
    best_error: float | None = None
    """The standard error of `best`, clustered by task."""
    before_error: float | None = None
    """The standard error of `before`, clustered by task; `after_error` likewise."""
    after_error: float | None = None
    counted: int = 0
    """Rollouts of the last evaluation that its mean is over."""
    change: float | None = None
    """Held-out reward after minus before, in pairs of tasks."""
    change_error: float | None = None
    """The standard error of `change`, from the differences of the tasks."""
    test: float | None = None
    """Reward on the test tasks, evaluated once with the weights of `best_step`, or the last if it is None."""
    test_error: float | None = None
    """The standard error of `test`, clustered by task."""
    policy: str = DEFAULT_POLICY
    """Name of the policy that was trained; of several the first."""
    policies: tuple[str, ...] = ()
    """Names of all policies that were trained."""
    updates: int = 0
    """Updates of the weights since the run began; with 0 it has trained nothing."""
    standstill: str | None = None
    """Why the run has not moved, if its policy or its rewards have not."""

    def episodes(self, group: str) -> list[Episode]:
        """Return the episodes of a group: `train-0` is the run's first, `eval-20-TASK` is of step 20's evaluation."""
        store = Database(self.folder / STORE_NAME, readonly=True)
        with closing(store), store.reader.begin() as connection:
            return queries.group_episodes(connection, self.run, group)

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint, a Hugging Face folder."""
        return latest_checkpoint(self.folder, self.policy)

    @property
    def checkpoints(self) -> dict[str, Path | None]:
        """The latest checkpoint of each policy."""
        return {policy: latest_checkpoint(self.folder, policy) for policy in self.policies}


async def train(
    config: Config,
    restart: bool = False,
    accept_changes: bool = False,
    on_second_interrupt: Callable[[], None] = lambda: None,
    worker_command: str = "leyden worker CONFIG.toml",
    ray_address: str | None = None,
) -> TrainingResult:
    """Train until the last step or SIGINT: the first one finishes the step and saves, the second one stops at once.

    The first one abandons an evaluation before the first step or after the last one: there is nothing to save.

    `worker_command` is printed, with server and key, for the workers of a run that has none on this machine.

    With a `ray_address`, ranks, engines and workers run on that cluster, of which this machine is a node.

    The thread that computes updates cannot be stopped: it ends when it has computed what it was given.
    """
    started = time.monotonic()
    algorithms, own = algorithms_of(config), policy_configs(config)
    for name in algorithms:
        objective_of(own[name])  # refuses a loss that cannot be loaded
    tasks = read_tasks(config)
    unused = dict.fromkeys(note for name in algorithms for note in unused_settings(own[name].algorithm))
    for note in (*unused, *_too_few_tasks(config, tasks)):
        print_note(note)
    for one in own.values():
        check_tokenizer(find_model(one.model, one.base))
    folder = RunFolder.of(config)
    if restart and (archive := folder.archive()) is not None:
        print_note(f"the earlier run is now {archive}")
    config, learning_rates = with_learning_rates(config, folder)
    with _cluster(config, ray_address) as cluster, folder.acquire(config, accept_changes) as resumed:
        folder.environment_file.write_text(json.dumps(describe_environment(), indent=1) + "\n")
        if resumed.archive is not None:
            changed = "the configuration or the code has changed"
            print_note(f"{changed}: what was recorded with the earlier one is now {resumed.archive}")
        if resumed.edited:
            edited = ", ".join(resumed.edited)
            print_note(f"{edited} changed since the run was last started: the steps to come use what is there now")
        for note in learning_rates:
            print_note(note)
        run = partial(_train, config, tasks, algorithms, folder, on_second_interrupt, worker_command, cluster)
        states = await _restarting(run, config.training.restarts)
    policy, state = next(iter(states.items()))
    metrics = read_metrics(folder.metrics_file, policy)
    if metrics:
        draw_image(
            metrics, f"{config.run}: {', '.join(dict.fromkeys(one.model for one in own.values()))}", folder.curve
        )
        print_note(draw_text(metrics))
        print_note(time_summary(metrics))
    rewards, errors = (dict(metric_points(metrics, f"held_out/{one}")) for one in ("reward", "error"))
    newest = max(rewards, default=0)
    last = {name: value for line in metrics for name, value in line.items()}
    return TrainingResult(
        run=config.run,
        folder=folder.path,
        step=state.step,
        steps=config.training.steps,
        before=rewards.get(0),
        after=rewards[newest] if newest else None,
        best_step=state.best_step,
        seconds=time.monotonic() - started,
        best=state.best_reward,
        best_error=errors.get(state.best_step) if state.best_step is not None else None,
        before_error=errors.get(0),
        after_error=errors.get(newest),
        counted=int(last.get("held_out/counted", 0)),
        change=last.get("held_out/change"),
        change_error=last.get("held_out/change_error"),
        test=last.get("test/reward"),
        test_error=last.get("test/error"),
        policy=policy,
        policies=tuple(states),
        updates=sum(one.version for one in states.values()),
        standstill=_standstill(config, folder, states),
    )


def _too_few_tasks(config: Config, tasks: Tasks) -> list[str]:
    count, needed = len(tasks.train), config.training.tasks_per_step
    return [f"a step takes {needed} tasks and there are {count}: some come twice"] if needed > count else []


@contextmanager
def _cluster(config: Config, address: str | None) -> Iterator[RayCluster | None]:
    """Connect to a cluster on which a run can be trained; None without an address."""
    if address is None:
        yield None
        return
    if address.startswith("ray://"):
        raise ConfigError(
            "--ray-address: a run is on a node of its cluster: name the cluster as HOST:PORT, not as ray://"
        )
    try:
        with connected(address) as ray:
            yield RayCluster(ray, config)
    except ClusterError as error:
        raise ConfigError(str(error)) from error


async def _restarting(run: Callable[[], Awaitable[States]], restarts: int) -> States:
    """Run a training; one that has lost a training process goes on from its checkpoint, so often."""
    for number in range(1, restarts + 1):
        try:
            return await run()
        except RankLost as error:
            print_note(f"{error}; the run goes on from its last checkpoint (restart {number} of {restarts})")
    return await run()


def _standstill(config: Config, folder: RunFolder, policies: Iterable[str]) -> str | None:
    """Return why the policies have not moved; of several, each that has not is named."""
    found = {
        name: StandstillDetector.of(read_metrics(folder.metrics_file, name), config.training).verdict
        for name in policies
    }
    told = [why if len(found) == 1 else f"{name}: {why}" for name, why in found.items() if why is not None]
    return "; ".join(told) or None


async def _train(
    config: Config,
    tasks: Tasks,
    algorithms: Mapping[str, Algorithm],
    folder: RunFolder,
    on_second_interrupt: Callable[[], None],
    worker_command: str,
    cluster: RayCluster | None,
) -> States:
    """Train from the latest checkpoint, or from the beginning, to the last step; return the states of the policies."""
    async with AsyncExitStack() as opened:
        if cluster is not None:
            await opened.enter_async_context(cluster.reserved(folder.path))
        local = await open_learner(opened, config, algorithms, folder.path, cluster)
        states, several = local.states, len(local.states) > 1
        step = next(iter(states.values())).step
        if step:
            print_note(f"resuming {config.run} after step {step}")
        elif folder.metrics_file.exists():
            print_note(f"{config.run} has no checkpoint yet: it begins again, with the rollouts that were recorded")
        sinks = opened.enter_context(opened_sinks(config, folder.path))
        stack = await opened.enter_async_context(local_stack(config, folder.path, local.policies, config.run, cluster))
        print_note(f"dashboard: {stack.server.running.dashboard}&to=/runs/{config.run}")
        if stack.worker is None:
            print_note(
                f"waiting for workers: {worker_command} --server {stack.server.running.advertised} "
                f"--key-file {shlex.quote(str(folder.path / 'worker.key'))}"
            )
        logs = {
            name: MetricsLog(folder.metrics_file, name, step, stack.remote, config.run, sinks, several)
            for name in states
        }
        lines = read_metrics(folder.metrics_file, next(iter(states)))
        measured = metric_points(lines, "held_out/reward")
        last, reward = measured[-1] if measured else (0, None)
        error = dict(metric_points(lines, "held_out/error")).get(last)
        display = ConsoleReport(stderr_console(), config.training.steps, reward, error, last, several)
        if any(line["step"] == config.training.steps and "test/reward" in line for line in lines):
            tasks = replace(tasks, test=())  # they are measured once
        parts = RunParts(stack.remote, stack.engines, local.learner, (display,), logs, stack.server.starting_held)
        pipeline = build_pipeline(config, algorithms, tasks, parts, states, folder.path)
        trainer = Trainer(config, pipeline, states)
        opened.enter_context(notes_logged(folder.path / "train.log"))
        try:
            with _interruptible(on_second_interrupt, lambda: trainer.waits_for_evaluation) as stop:
                states = await run_with(local.parts, stack.run(trainer.run(stop)))
                if next(iter(states.values())).step >= config.training.steps:
                    await stack.remote.end_run(config.run)
        finally:
            display.close()
            for log in logs.values():
                await log.close()
    return states


@contextmanager
def _interruptible(
    on_second_interrupt: Callable[[], None], waits_for_evaluation: Callable[[], bool]
) -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT or SIGTERM sets; a second signal cancels the current task."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():  # as in a notebook: signals go to the main thread
        yield stop
        return
    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stop.is_set():
            on_second_interrupt()
            task.cancel()
        else:
            if waits_for_evaluation():
                print_note("stopping the evaluation; the next start uses the rollouts that are finished")
            else:
                print_note("finishing this step, then saving; press Ctrl-C again to stop at once")
            stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupted)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def describe_environment() -> dict[str, str]:
    """Describe the machine and the packages that a run uses, for its report."""
    found = {
        "leyden": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
    }
    for number in range(torch.cuda.device_count()):
        found[f"gpu {number}"] = torch.cuda.get_device_name(number)
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
