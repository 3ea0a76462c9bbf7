"""`leyden eval`: measures a model on the held-out tasks, or on others, without training it."""

import re
import time
from pathlib import Path

from msgspec import field

from leyden.config import Config, ConfigError
from leyden.local.notes import stderr_console
from leyden.local.policies import load_policies
from leyden.local.readable import Readable
from leyden.local.stack import local_stack
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.evaluation import evaluate
from leyden.orchestrator.rollouts.tasks import read_task_file, read_tasks
from leyden.runs.run_checkpoints import known_runs, with_model
from leyden.runs.run_folder import RunFolder


class EvaluatedModel(Readable, frozen=True):
    """The result of `leyden.evaluate`."""

    run: str
    model: str
    tasks: int
    reward: float | None
    error: float | None
    """The standard error of the mean, clustered by task."""
    counted: int
    """Rollouts that the mean is over."""
    outcomes: dict[str, int]
    folder: Path
    seconds: float
    pass_at: dict[int, float] = field(default_factory=dict)
    """By k, the share of tasks that at least one of k rollouts solves; empty with one rollout per task."""


def _as_name(model: str, home: Path) -> str:
    """Return the name of a model, or the path of its folder, as the end of a run's name; within `home` from there."""
    path = Path(model)
    inside = str(path.relative_to(home.absolute())) if path.is_relative_to(home.absolute()) else model
    return re.sub(r"[^A-Za-z0-9.]+", "-", inside).strip("-.")[-60:]


async def evaluate_model(config: Config, model: str | None = None, tasks: str | None = None) -> EvaluatedModel:
    """Run the agent on every held-out task (or every task of a file) with a model (default: the configuration's).

    The name or the folder of a run stands for its best checkpoint.
    """
    started = time.monotonic()
    chosen = read_task_file(config, tasks) if tasks is not None else read_tasks(config).held_out
    if not chosen:
        raise ConfigError("`held_out` leaves no tasks to measure on: raise it, or name a file with --tasks")
    home = Path(config.home)
    loaded = (
        load_policies(config) if model is None else load_policies(with_model(config, model, home), known_runs(home))
    )
    folder = RunFolder.renewed(config, "eval" if model is None else f"eval-{_as_name(model, home)}")
    run = folder.path.name
    with folder.acquire(config):
        async with local_stack(config, folder.path, loaded, run) as stack:
            with ProgressLine(stderr_console()) as line:

                def progress(done: int, total: int) -> None:
                    line.show(f"{done} of {total} rollouts")

                collector = RolloutCollector(stack.remote, run)
                measured, _ = await stack.run(evaluate(collector, "eval", chosen, config, progress))
    return EvaluatedModel(
        run=run,
        model=", ".join(dict.fromkeys(one.source.name for one in loaded)),
        tasks=len(chosen),
        reward=measured.reward,
        error=measured.error,
        counted=measured.counted,
        outcomes=measured.outcomes,
        folder=folder.path,
        seconds=time.monotonic() - started,
        pass_at=measured.pass_at,
    )
