"""`leyden train`: starts or resumes a run and trains until its last step."""

import asyncio
import json
import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from leyden import __version__
from leyden.config import Config
from leyden.episodes import Episode
from leyden.learner.default_learning_rate import default_learning_rate
from leyden.learner.loading import check_tokenizer, count_parameters
from leyden.learner.objective import Objective, objective_of
from leyden.learner.protocol import TrainerState
from leyden.learner.ranks.errors import RankLost
from leyden.local.learner import open_learner
from leyden.local.notes import notes_logged, print_note, stderr_console
from leyden.local.readable import Readable
from leyden.local.stack import local_stack, run_with
from leyden.models.source import ModelSource, find_model
from leyden.orchestrator.algorithm.resolve import Algorithm, algorithm_of
from leyden.orchestrator.health.standstill import StandstillDetector
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.orchestrator.report.console import ConsoleReport
from leyden.orchestrator.report.metrics_log import MetricsLog, read_metrics
from leyden.orchestrator.report.plot import draw_image, draw_text, metric_points
from leyden.orchestrator.report.sinks import opened_sinks
from leyden.orchestrator.report.time_summary import time_summary
from leyden.orchestrator.rollouts.tasks import Tasks, read_tasks
from leyden.process.resources import usable_cores
from leyden.records import DEFAULT_POLICY
from leyden.rl.registry import unused_settings
from leyden.runs.checkpoint_files import latest_checkpoint
from leyden.runs.run_folder import RunFolder, stored_config
from leyden.store.database import Database
from leyden.store.read import queries

_PACKAGES = ("torch", "transformers", "tokenizers", "renderers", "peft", "vllm", "openai", "anthropic", "sqlalchemy")
"""Whose versions a run records."""


class TrainingResult(Readable, Struct, frozen=True):
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
    """Name of the policy that was trained."""
    updates: int = 0
    """Updates of the weights since the run began; with 0 it has trained nothing."""
    standstill: str | None = None
    """Why the run has not moved, if its policy or its rewards have not."""

    def episodes(self, group: str) -> list[Episode]:
        """Return the episodes of a group: `train-0` is the run's first, `eval-20-TASK` is of step 20's evaluation."""
        database = Database(str(self.folder / "leyden.db"), readonly=True)
        try:
            with database.reader.begin() as connection:
                return queries.group_episodes(connection, self.run, group)
        finally:
            database.close()

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint, a Hugging Face folder."""
        return latest_checkpoint(self.folder, self.policy)


async def train(
    config: Config,
    restart: bool = False,
    accept_changes: bool = False,
    on_second_interrupt: Callable[[], None] = lambda: None,
    worker_command: str = "leyden worker CONFIG.toml",
) -> TrainingResult:
    """Train until the last step or SIGINT: the first one finishes the step and saves, the second one stops at once.

    The first one abandons an evaluation before the first step or after the last one: there is nothing to save.

    `worker_command` is printed, with server and key, for the workers of a run that has none on this machine.

    The thread that computes updates cannot be stopped: it ends when it has computed what it was given.
    """
    started = time.monotonic()
    algorithm, objective = algorithm_of(config), objective_of(config)
    tasks = read_tasks(config)
    for note in (*unused_settings(config.algorithm), *_too_few_tasks(config, tasks)):
        print_note(note)
    source = find_model(config.model, config.base)
    check_tokenizer(source)
    folder = RunFolder.of(config)
    if restart and (archive := folder.archive()) is not None:
        print_note(f"the earlier run is now {archive}")
    config, learning_rate = with_learning_rate(config, folder, source)
    with folder.acquire(config, accept_changes) as resumed:
        folder.environment_file.write_text(json.dumps(describe_environment(), indent=1) + "\n")
        if resumed.archive is not None:
            changed = "the configuration or the code has changed"
            print_note(f"{changed}: what was recorded with the earlier one is now {resumed.archive}")
        if resumed.edited:
            edited = ", ".join(resumed.edited)
            print_note(f"{edited} changed since the run was last started: the steps to come use what is there now")
        print_note(learning_rate)
        run = partial(_train, config, tasks, algorithm, objective, source, folder, on_second_interrupt, worker_command)
        state = await _restarting(run, config.training.restarts)
    metrics = read_metrics(folder.metrics_file, config.policy)
    if metrics:
        draw_image(metrics, f"{config.run}: {config.model}", folder.curve)
        print_note(draw_text(metrics))
        print_note(time_summary(metrics))
    measured = metric_points(metrics, "held_out/reward")
    return TrainingResult(
        run=config.run,
        folder=folder.path,
        step=state.step,
        steps=config.training.steps,
        before=measured[0][1] if measured and measured[0][0] == 0 else None,
        after=measured[-1][1] if measured and measured[-1][0] > 0 else None,
        best_step=state.best_step,
        seconds=time.monotonic() - started,
        best=state.best_reward,
        best_error=_at(metrics, "held_out/error", state.best_step) if state.best_step is not None else None,
        before_error=_at(metrics, "held_out/error", 0),
        after_error=_at(metrics, "held_out/error", measured[-1][0]) if measured else None,
        counted=int(_last(metrics, "held_out/counted") or 0),
        change=_last(metrics, "held_out/change"),
        change_error=_last(metrics, "held_out/change_error"),
        test=_last(metrics, "test/reward"),
        test_error=_last(metrics, "test/error"),
        policy=config.policy,
        updates=state.version,
        standstill=StandstillDetector.of(metrics, config.training).verdict,
    )


def _last(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    points = metric_points(lines, name)
    return points[-1][1] if points else None


def _at(lines: Sequence[dict[str, Any]], name: str, step: int) -> float | None:
    return dict(metric_points(lines, name)).get(step)


def _too_few_tasks(config: Config, tasks: Tasks) -> list[str]:
    count, needed = len(tasks.train), config.training.tasks_per_step
    return [f"a step takes {needed} tasks and there are {count}: some come twice"] if needed > count else []


async def _restarting(run: Callable[[], Awaitable[TrainerState]], restarts: int) -> TrainerState:
    """Run a training; one that has lost a training process goes on from its checkpoint, so often."""
    for number in range(1, restarts + 1):
        try:
            return await run()
        except RankLost as error:
            print_note(f"{error}; the run goes on from its last checkpoint (restart {number} of {restarts})")
    return await run()


async def _train(
    config: Config,
    tasks: Tasks,
    algorithm: Algorithm,
    objective: Objective,
    source: ModelSource,
    folder: RunFolder,
    on_second_interrupt: Callable[[], None],
    worker_command: str,
) -> TrainerState:
    """Train from the latest checkpoint, or from the beginning, to the last step."""
    async with AsyncExitStack() as opened:
        local = await open_learner(opened, config, algorithm, objective, source, folder.path)
        learner, state = local.learner, local.state
        if state.step:
            print_note(f"resuming {config.run} after step {state.step}")
        sinks = opened.enter_context(opened_sinks(config, folder.path))
        stack = await opened.enter_async_context(
            local_stack(
                config, folder.path, local.model, source, state.version, config.run, local.policy, local.weights
            )
        )
        print_note(f"dashboard: {stack.server.running.dashboard}&to=/runs/{config.run}")
        if stack.worker is None:
            print_note(
                f"waiting for workers: {worker_command} --server {stack.server.running.advertised} "
                f"--key-file {shlex.quote(str(folder.path / 'worker.key'))}"
            )
        metrics = MetricsLog(folder.metrics_file, config.policy, state.step, stack.remote, config.run, sinks)
        lines = read_metrics(folder.metrics_file, config.policy)
        measured = metric_points(lines, "held_out/reward")
        step, reward = measured[-1] if measured else (0, None)
        error = _at(lines, "held_out/error", step)
        display = ConsoleReport(stderr_console(), config.training.steps, reward, error)
        if any(line["step"] == config.training.steps and "test/reward" in line for line in lines):
            tasks = replace(tasks, test=())  # they are measured once
        name = config.policy
        held = stack.server.starting_held
        parts = RunParts(
            stack.remote, {name: stack.engine}, learner, (display,), {name: metrics}, lambda policy: held()
        )
        pipeline = build_pipeline(config, {name: algorithm}, tasks, parts, {name: state}, folder.path)
        trainer = Trainer(config, pipeline, {name: state})
        opened.enter_context(notes_logged(folder.path / "train.log"))
        try:
            with _interruptible(on_second_interrupt, lambda: trainer.waits_for_evaluation) as stop:
                state = (await run_with(local.parts, stack.run(trainer.run(stop))))[name]
                if state.step >= config.training.steps:
                    await stack.remote.end_run(config.run)
        finally:
            display.close()
            await metrics.close()
    return state


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


def with_learning_rate(config: Config, folder: RunFolder, source: ModelSource) -> tuple[Config, str]:
    """Return the configuration with a learning rate, and a sentence about it.

    Unset, it is that of the run in this folder if it has trained a step, and otherwise the default for the model.
    """
    training = config.training
    rate, why = training.learning_rate, "as configured"
    if rate is None and folder.has_trained():
        rate, why = stored_config(folder.path).training.learning_rate, "with which the run began"
    elif rate is None:
        count = count_parameters(source)
        rate = default_learning_rate(count, training.lora is not None)
        adapters = "adapters of " if training.lora is not None else ""
        why = f"the default for {adapters}{count / 1e6:,.0f} million parameters (`training.learning_rate` sets it)"
    return replace(config, training=replace(training, learning_rate=rate)), f"learning rate {rate:.2g}, {why}"


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
