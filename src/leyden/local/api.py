"""`leyden.train` and `leyden.evaluate`: what a Python user writes, made into the same configuration as TOML."""

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
    **settings: Any,
) -> "TrainingResult":
    """Train the model behind an agent, or go on with a run of the same name.

    The arguments are the keys of a configuration file, put on top of one where a path is given; sections are
    dictionaries: `training={"steps": 20}`. `agent` and `reward` may be the functions themselves, `tasks` a list.
    """
    made = configured(config, restart=restart, agent=agent, tasks=tasks, reward=reward, **settings)
    wait_asleep()
    from leyden.local.train import train as train_run  # imports torch

    return run_to_completion(train_run(made), uvloop.run)


def evaluate(
    config: str | Path | None = None,
    /,
    *,
    agent: str | Callable[..., Any] | None = None,
    tasks: str | Path | Sequence[Any] | None = None,
    reward: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> "EvaluatedModel":
    """Measure a model on the tasks held out, without training it. The arguments are those of `train`."""
    made = configured(config, agent=agent, tasks=tasks, reward=reward, **settings)
    wait_asleep()
    from leyden.local.evaluate import measure_model  # imports torch

    return run_to_completion(measure_model(made), uvloop.run)


def configured(config: str | Path | None, *, restart: bool = False, **settings: Any) -> Config:
    """A configuration from a file, or none, and arguments."""
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
    if restart and (aside := folder.put_aside()) is not None:
        Console(stderr=True).print(f"the earlier run is now {aside}", highlight=False, soft_wrap=True)
    for name, value in objects.items():
        document[name] = _kept(name, value, folder.path)
    return read_config(document)


_OBJECTS = ("agent", "reward", "tasks")
"""What may be given as a Python object; it is then kept in the run's folder, for other processes and other days."""


def _kept(name: str, value: Any, folder: Path) -> str:
    if name == "tasks":
        path = folder / "tasks.jsonl"
        text = tasks_as_jsonl(value)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)
    if not callable(value):
        raise ConfigError(f"`{name}`: {value!r} is no function: give one, or write module:name")
    try:
        return reference_to(value, str(folder))
    except LoadError as error:
        raise ConfigError(f"`{name}`: {error}") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
