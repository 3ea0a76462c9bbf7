"""The Python API. Arguments become the same configuration as a TOML file, under the same names.

Errors are raised once, without the frames of the event loop, and speak of arguments.
"""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import uvloop

from leyden.config import Config, ConfigError, read_config, read_file
from leyden.estimates import PairedDifference
from leyden.learner.errors import TrainingError
from leyden.local.notes import print_note
from leyden.local.preflight import check_inputs
from leyden.orchestrator.rollouts.tasks import tasks_as_jsonl
from leyden.process.resources import configure_openmp
from leyden.runs.run_folder import RunFolder
from leyden.store.errors import StoreError
from leyden.user_code.bridge import run_to_completion
from leyden.user_code.loading import LoadError, reference_to

if TYPE_CHECKING:
    from leyden.local.dev import DevReport
    from leyden.local.evaluate import EvaluatedModel
    from leyden.local.train import TrainingResult

T = TypeVar("T")
P = ParamSpec("P")
Named = str | Callable[..., Any]
"""A function, or a reference to one: `module:name` or `file.py:name`."""
TaskList = str | Path | Sequence[Any]
"""A file with one JSON object a line, or a list of tasks."""


def _without_noise(function: Callable[P, T]) -> Callable[P, T]:
    """Raise an error of the function that is the user's again, without what was raised before it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ConfigError, LoadError, TrainingError, StoreError) as error:
            failure = type(error)(str(error))
        raise failure

    return call


@_without_noise
def train(
    config: str | Path | None = None,
    /,
    *,
    agent: Named | None = None,
    tasks: TaskList | None = None,
    reward: Named | None = None,
    restart: bool = False,
    accept_changes: bool = False,
    **settings: Any,
) -> "TrainingResult":
    """Train the model behind an agent, or resume the run of the same name.

    The arguments are the keys of a configuration file and override those of the file at `config`; sections are
    dictionaries: `training={"steps": 20}`. `agent` and `reward` may be the functions themselves, `tasks` a list.
    `restart` archives an earlier run of the same name and starts over. `accept_changes` continues a run although
    the file of its tasks was edited.
    """
    run_config = build_config(config, restart=restart, agent=agent, tasks=tasks, reward=reward, **settings)
    check_inputs(run_config, resuming=partial(RunFolder.of(run_config).check, accept_changes=accept_changes))
    configure_openmp()
    from leyden.local.train import train as train_run  # imports torch

    return _run(train_run(run_config, accept_changes=accept_changes))


@_without_noise
def evaluate(
    config: str | Path | None = None,
    /,
    *,
    agent: Named | None = None,
    tasks: TaskList | None = None,
    reward: Named | None = None,
    **settings: Any,
) -> "EvaluatedModel":
    """Measure a model without training it: on all `tasks` given, or on the held-out tasks of the file at `config`.

    The arguments are those of `train`. `model` may be a checkpoint: `model="runs/calc/step-50"`.
    """
    run_config = build_config(config, trains=False, agent=agent, tasks=tasks, reward=reward, **settings)
    check_inputs(run_config, run_config.tasks if tasks is not None else None)
    configure_openmp()
    from leyden.local.evaluate import evaluate_model  # imports torch

    return _run(evaluate_model(run_config, tasks=run_config.tasks if tasks is not None else None))


@_without_noise
def dev(
    config: str | Path | None = None,
    /,
    *,
    agent: Named | None = None,
    tasks: TaskList | None = None,
    reward: Named | None = None,
    limit: int = 4,
    rollouts: int = 2,
    replay: bool = False,
    **settings: Any,
) -> "DevReport":
    """Run an agent `rollouts` times on each of the first `limit` tasks and report what was recorded, without training.

    With `replay` each rollout runs again, answered from its record. The other arguments are those of `train`.
    """
    run_config = build_config(config, trains=False, agent=agent, tasks=tasks, reward=reward, **settings)
    check_inputs(run_config)
    configure_openmp()
    from leyden.local.dev import run_dev  # imports torch

    return _run(run_dev(run_config, limit, rollouts, replay))[0]


@_without_noise
def export(
    run: str, /, *, to: str | Path, step: str | int = "best", home: str | Path = "runs", policy: str | None = None
) -> Path:
    """Write the weights of a run as a folder that `transformers` loads; returns the folder.

    `step` is `"best"`, `"last"` or a number. `policy` is one of several that the run trains.
    """
    configure_openmp()
    from leyden.local.export import export as export_run  # imports torch
    from leyden.runs.run_checkpoints import require_run_folder

    export_run(require_run_folder(Path(home), run), Path(to), str(step), policy)
    return Path(to)


@_without_noise
def compare(
    first: str, second: str, /, *, steps: tuple[int | None, int | None] = (None, None), home: str | Path = "runs"
) -> PairedDifference:
    """Compare the last evaluations of two runs (or those of `steps`) task by task: the difference and its error."""
    from leyden.runs.stored_runs import compare_runs  # imports SQLAlchemy

    return _run(compare_runs(Path(home), first, second, steps))


def _run(work: Coroutine[Any, Any, T]) -> T:
    return run_to_completion(work, uvloop.run)


def build_config(config: str | Path | None, *, restart: bool = False, trains: bool = True, **settings: Any) -> Config:
    """Build a configuration from arguments and, if given, a file. With `restart` an earlier run is archived.

    If the run is not to be trained, a list of tasks does not replace the one that it trains on.
    """
    document: dict[str, Any] = read_file(Path(config)) if config is not None else {"base": str(Path.cwd())}
    given = {name: value for name, value in settings.items() if value is not None}
    agent = given.get("agent", document.get("agent"))
    document.setdefault("run", getattr(agent, "__name__", "run").strip("<>_"))
    named = {name: value for name, value in given.items() if isinstance(value, (str, Path)) or name not in _OBJECTS}
    for name, value in named.items():
        inner = document.get(name)
        document[name] = {**inner, **value} if isinstance(value, dict) and isinstance(inner, dict) else _plain(value)
    objects = {name: value for name, value in given.items() if name not in named}
    checked = read_config({**document, **dict.fromkeys(objects, "")})
    folder = RunFolder.of(checked)
    if restart and (archive := folder.archive()) is not None:
        print_note(f"the earlier run is now {archive}")
    for name, value in objects.items():
        document[name] = _store_object(name, value, folder.path, trains)
    return read_config(document)


_OBJECTS = ("agent", "reward", "tasks")
"""Keys that may be Python objects. Those are stored in the run's folder, for workers and for resuming."""


def _store_object(name: str, value: Any, folder: Path, trains: bool) -> str:
    """Store an object in the run's folder; returns the reference to write into the configuration."""
    if name == "tasks":
        if not value:
            raise ConfigError("`tasks` is an empty list: pass at least one task")
        text = tasks_as_jsonl(value)
        digest = blake2b(text.encode(), digest_size=8).hexdigest()
        path = folder / ("tasks.jsonl" if trains else f"tasks-{digest}.jsonl")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)
    if not callable(value):
        raise ConfigError(f"`{name}`: {value!r} is not a function: pass a function, or write module:name")
    try:
        return reference_to(value, str(folder))
    except LoadError as error:
        raise ConfigError(f"`{name}`: {error}") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
