"""`leyden train`: a run from its configuration to its last checkpoint, begun or gone on with."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from leyden.config import Config
from leyden.episodes import Episode
from leyden.local.run_folder import RunFolder
from leyden.local.stack import local_stack
from leyden.store import queries
from leyden.store.database import Database
from leyden.trainer.algorithm.resolve import Algorithm, algorithm_of, unused_settings
from leyden.trainer.checkpoint import Checkpoints, TrainerState, latest_checkpoint, restore_checkpoint
from leyden.trainer.loop import Trainer
from leyden.trainer.policy.loading import ModelSource, check_tokenizer, find_model, load_model
from leyden.trainer.policy.policy import Policy
from leyden.trainer.report.console import ConsoleReport
from leyden.trainer.report.metrics_log import MetricsLog, read_metrics
from leyden.trainer.report.plot import draw_image, draw_text, metric_points
from leyden.trainer.report.sinks import open_sinks
from leyden.trainer.rollouts.tasks import Tasks, read_tasks


class TrainingResult(Struct, frozen=True):
    """What came of a run."""

    run: str
    folder: Path
    step: int
    steps: int
    before: float | None
    """Held-out reward before the first step."""
    after: float | None
    """Held-out reward at the last measurement; None where there was none after a step."""
    best_step: int | None
    seconds: float
    """Of this process: a run that went on had others before."""

    def episodes(self, group: str) -> list[Episode]:
        """What the rollouts of a group left behind: `step-7-0`, or `eval-20-TASK` for a measurement after a step."""
        database = Database(str(self.folder / "leyden.db"), readonly=True)
        try:
            with database.reader.begin() as look:
                return queries.group_episodes(look, self.run, group)
        finally:
            database.close()

    @property
    def checkpoint(self) -> Path | None:
        """The newest weights, a Hugging Face folder."""
        return latest_checkpoint(self.folder)


async def train(config: Config, restart: bool = False, console: Console | None = None) -> TrainingResult:
    """Train until the last step, or until SIGINT: once finishes the step and saves, twice stops at once."""
    console = console or Console(stderr=True)
    began = time.monotonic()
    algorithm = algorithm_of(config)
    tasks = read_tasks(config)
    for note in (*unused_settings(config.algorithm), *_scarce(config, tasks)):
        console.print(note, highlight=False, soft_wrap=True)
    source = find_model(config.model, config.base)
    check_tokenizer(source)
    folder = RunFolder.of(config)
    if restart and (aside := folder.put_aside()) is not None:
        console.print(f"the earlier run is now {aside}", highlight=False, soft_wrap=True)
    with folder.opened(config) as aside:
        if aside is not None:
            said = f"what was begun with another configuration is now {aside}"
            console.print(said, highlight=False, soft_wrap=True)
        state = await _train(config, tasks, algorithm, source, folder, console)
    rows = read_metrics(folder.journal)
    draw_image(rows, f"{config.run}: {config.model}", folder.curve)
    console.print(draw_text(rows), highlight=False)
    measured = metric_points(rows, "held_out/reward")
    return TrainingResult(
        run=config.run,
        folder=folder.path,
        step=state.step,
        steps=config.training.steps,
        before=measured[0][1] if measured and measured[0][0] == 0 else None,
        after=measured[-1][1] if measured and measured[-1][0] > 0 else None,
        best_step=state.best_step,
        seconds=time.monotonic() - began,
    )


def _scarce(config: Config, tasks: Tasks) -> list[str]:
    """What a run has too little of to learn or to measure well."""
    there, wanted = len(tasks.train), config.training.tasks_per_step
    return [f"a step takes {wanted} tasks and there are {there}: some come twice"] if wanted > there else []


async def _train(
    config: Config, tasks: Tasks, algorithm: Algorithm, source: ModelSource, folder: RunFolder, console: Console
) -> TrainerState:
    """From wherever the folder's run is to its last step."""
    model = load_model(source, config.engine.dtype, True, config.training.lora, algorithm.reference)
    policy = Policy(model, config.training, algorithm.critic, algorithm.reference)
    if policy.unfit is not None:
        console.print(f"{source.name} cannot be trained as a tree, so every call is computed by itself: {policy.unfit}")
    checkpoints = Checkpoints(folder.path, source.folder, config.checkpoints.keep)
    last = latest_checkpoint(folder.path)
    state = restore_checkpoint(last, policy) if last is not None else TrainerState()
    if state.step:
        console.print(f"going on with [bold]{config.run}[/] after step {state.step}", highlight=False, soft_wrap=True)
    sinks = open_sinks(config, folder.path)
    async with local_stack(config, folder.path, model, source, state.version, config.run) as home:
        if home.workers is None:
            console.print(
                f"waiting for workers: leyden worker CONFIG.toml --server {home.server.running.advertised} "
                f"--key-file {folder.path / 'worker.key'}",
                highlight=False,
                soft_wrap=True,
            )
        journal = MetricsLog(folder.journal, state.step, home.remote, config.run, sinks, state.policy)
        measured = metric_points(read_metrics(folder.journal), "held_out/reward")
        display = ConsoleReport(console, config.training.steps, measured[-1][1] if measured else None)
        trainer = Trainer(
            config, tasks, home.remote, algorithm, policy, home.engine, checkpoints, state, (journal, display)
        )
        try:
            with _interruptible(console) as stop:
                state = await home.watched(trainer.run(stop))
        finally:
            display.close()
            await journal.close()
    return state


@contextmanager
def _interruptible(console: Console) -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets; a second one ends the task in hand."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():  # in a notebook, say: signals are not ours
        yield stop
        return
    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stop.is_set():
            task.cancel()
        else:
            console.print("finishing this step, then saving; press Ctrl-C again to stop at once", highlight=False)
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
