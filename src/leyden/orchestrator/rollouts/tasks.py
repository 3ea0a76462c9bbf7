"""Reads the user's tasks, splits off the held-out ones, and orders the others by a seed."""

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from leyden.config import Config, ConfigError
from leyden.orchestrator.rollouts.task_rows import read_rows
from leyden.records import ID_RULE, Id, Task

MAX_ID_LENGTH = 120
"""Characters of a task's id: a group of rollouts is named after it."""

_NAMED = 3
"""Duplicates that an error names."""


class Tasks(Struct, frozen=True):
    """The tasks to train on and those to evaluate on; no task is in two of them."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    """Evaluated during training, to choose the best checkpoint."""
    seed: int
    test: tuple[Task, ...] = ()
    """Evaluated once, at the end."""

    def at(self, position: int) -> Task:
        """Return the task at a position of the endless order: every task once per epoch, each epoch shuffled anew."""
        epoch, index = divmod(position, len(self.train))
        return self.train[_order(self.seed, epoch, len(self.train))[index]]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, tasks: int) -> list[int]:
    order = list(range(tasks))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order


def read_tasks(config: Config) -> Tasks:
    """Read the tasks that a configuration names; a `ConfigError` is one line that says what is wrong."""
    every = read_task_file(config, config.tasks)
    _check_normalize_by(config.algorithm.normalize_by, every)
    order = sorted(every, key=lambda task: blake2b(f"{config.seed}/{task.id}".encode()).digest())
    split: dict[str, tuple[Task, ...]] = {}
    for name, chosen in (("held_out", config.held_out), ("test", config.test)):
        if isinstance(chosen, str):
            split[name] = read_task_file(config, chosen, name)
            continue
        number = chosen if isinstance(chosen, int) else round(chosen * len(every))
        if number >= len(order):
            raise ConfigError(f"`{name}`: {number} of {len(order)} tasks leave none to train on: lower it")
        ids = {task.id for task in order[:number]}
        split[name], order = tuple(task for task in every if task.id in ids), order[number:]
    ids = {task.id for task in order}
    split["tasks"] = tuple(task for task in every if task.id in ids)
    for name, other in (("held_out", "tasks"), ("test", "tasks"), ("test", "held_out")):
        _check_separate(name, split[name], other, split[other])
    return Tasks(split["tasks"], split["held_out"], config.seed, split["test"])


def _check_separate(name: str, tasks: Sequence[Task], other: str, others: Sequence[Task]) -> None:
    """Refuse a task that is in two of the splits, by its id or by its content."""
    by_id, by_content = {task.id: task for task in others}, {_content(task.input): task for task in others}
    both = [
        (task, found)
        for task in tasks
        if (found := by_id.get(task.id) or by_content.get(_content(task.input))) is not None
    ]
    if both:
        named = [f"{task.id}" if task.id == found.id else f"{task.id} (there {found.id})" for task, found in both[:3]]
        more = f" and {len(both) - 3} more" if len(both) > 3 else ""
        raise ConfigError(
            f"`{name}` and `{other}` have {len(both)} tasks in common: {', '.join(named)}{more}; remove them from one"
        )


def _content(task_input: dict[str, Any]) -> str:
    """Return a task as text, without its id."""
    return json.dumps({k: v for k, v in task_input.items() if k != "id"}, sort_keys=True, ensure_ascii=False)


def read_task_file(config: Config, file: str, key: str = "tasks") -> tuple[Task, ...]:
    """Read a file of tasks (`task_rows.py` says which). A task without an `id` gets one from its content.

    `key` is the configuration key that names the file, for errors.
    """
    path = Path(config.base) / file
    rows = read_rows(path, key, config.columns)
    if not rows:
        raise ConfigError(f"`{key}`: {path} has no tasks: write one JSON object a line")
    seen: dict[str, int] = {}
    tasks, repeated = [], []
    for number, task_input in rows:
        task = _task(path, number, task_input)
        if task.id in seen:
            repeated.append(f"line {number} repeats line {seen[task.id]}")
            continue
        seen[task.id] = number
        tasks.append(task)
    if repeated and not config.drop_duplicates:
        more = ", ..." if len(repeated) > _NAMED else ""
        raise ConfigError(
            f"{path}: {len(repeated)} of {len(rows)} tasks are there already, by their `id` or content: "
            f"{', '.join(repeated[:_NAMED])}{more}: remove them, give them different ids, or set drop_duplicates=true"
        )
    return tuple(tasks)


def tasks_as_jsonl(tasks: Sequence[Any]) -> str:
    """Encode tasks that are Python objects as the text of a task file."""
    try:
        return "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`tasks`: a task must be JSON: {error}") from error


def _check_normalize_by(key: str | None, tasks: Sequence[Task]) -> None:
    keys = dict.fromkeys(name for task in tasks for name in task.input)
    if key is not None and key not in keys:
        raise ConfigError(f"`algorithm.normalize_by`: no task has a {key!r}; their keys are {', '.join(keys)}")


def _task(path: Path, number: int, task_input: dict[str, Any]) -> Task:
    if "id" not in task_input:
        return Task(blake2b(_content(task_input).encode(), digest_size=8).hexdigest(), task_input)
    try:
        id = msgspec.convert(str(task_input["id"]), Id)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{number}: {task_input['id']!r} cannot be an id: write {ID_RULE}") from error
    if len(id) > MAX_ID_LENGTH:
        raise ConfigError(f"{path}:{number}: an `id` has {MAX_ID_LENGTH} characters at the most, this one {len(id)}")
    return Task(id, task_input)
