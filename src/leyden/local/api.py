"""`leyden.train` and `leyden.evaluate`: their arguments become the same configuration as a TOML file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console

from leyden.client.user_code import run_to_completion
from leyden.config import Config, ConfigError, current_keys, read_config, read_file
from leyden.loading import LoadError, reference_to
from leyden.local.openmp import wait_asleep
from leyden.local.run_folder import RunFolder
from leyden.trainer.rollouts.tasks import tasks_as_jsonl

if TYPE_CHECKING:
    from leyden.local.evaluate import EvaluatedModel
    from leyden.local.train import TrainingResult


def train(
    config: str | Path | None = None,
    /,
    *,
    agent: str | Callable[..., Any] | None = None,
    tasks: str | Path | Sequence[Any] | None = None,
    reward: str | Callable[..., Any] | None = None,
    restart: bool = False,
    accept_changes: bool = False,
    **settings: Any,
) -> "TrainingResult":
    """Train the model behind an agent, or resume the run of the same name.

    The arguments are the keys of a configuration file and override those of the file at `config`; sections are
    dictionaries: `training={"steps": 20}`. `agent` and `reward` may be the functions themselves, `tasks` a list.
    `restart` archives an earlier run of the same name and starts over. `accept_changes` continues a run although the
    code of the agent or the reward was edited.
    """
    run_config = build_config(config, restart=restart, agent=agent, tasks=tasks, reward=reward, **settings)
    wait_asleep()
    from leyden.local.train import train as train_run  # imports torch

    return run_to_completion(train_run(run_config, accept_changes=accept_changes), uvloop.run)


def evaluate(
    config: str | Path | None = None,
    /,
    *,
    agent: str | Callable[..., Any] | None = None,
    tasks: str | Path | Sequence[Any] | None = None,
    reward: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> "EvaluatedModel":
    """Measure a model on the held-out tasks, without training it. The arguments are those of `train`."""
    run_config = build_config(config, agent=agent, tasks=tasks, reward=reward, **settings)
    wait_asleep()
    from leyden.local.evaluate import evaluate_model  # imports torch

    return run_to_completion(evaluate_model(run_config), uvloop.run)


def build_config(config: str | Path | None, *, restart: bool = False, **settings: Any) -> Config:
    """Build a configuration from arguments and, where given, a file. With `restart` an earlier run is archived."""
    document: dict[str, Any] = read_file(Path(config)) if config is not None else {"base": str(Path.cwd())}
    given = current_keys({name: value for name, value in settings.items() if value is not None})
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
        Console(stderr=True).print(f"the earlier run is now {archive}", highlight=False, soft_wrap=True)
    for name, value in objects.items():
        document[name] = _store_object(name, value, folder.path)
    return read_config(document)


_OBJECTS = ("agent", "reward", "tasks")
"""Keys that may be Python objects. Those are stored in the run's folder, for workers and for resuming."""


def _store_object(name: str, value: Any, folder: Path) -> str:
    """Store an object in the run's folder; returns the reference to write into the configuration."""
    if name == "tasks":
        path = folder / "tasks.jsonl"
        text = tasks_as_jsonl(value)
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
