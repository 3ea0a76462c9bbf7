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
from leyden.records import ID_RULE, Id, Task

MAX_ID_LENGTH = 120
"""Characters of a task's id: a group of rollouts is named after it."""


class Tasks(Struct, frozen=True):
    """The tasks to train on and those to evaluate on."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    seed: int

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
    base = Path(config.base)
    tasks = read_task_file(base / config.tasks)
    _check_normalize_by(config.algorithm.normalize_by, tasks)
    if isinstance(config.held_out, str):
        held_out = read_task_file(base / config.held_out)
        both = {task.id for task in tasks} & {task.id for task in held_out}
        if both:
            raise ConfigError(
                f"`held_out`: {config.held_out} has {len(both)} of the tasks in {config.tasks}, {min(both)} say"
            )
        return Tasks(tasks, held_out, config.seed)
    number = config.held_out if isinstance(config.held_out, int) else round(config.held_out * len(tasks))
    if number >= len(tasks):
        raise ConfigError(f"`held_out`: {number} of {len(tasks)} tasks leave none to train on")
    shuffled = sorted(tasks, key=lambda task: blake2b(f"{config.seed}/{task.id}".encode()).digest())
    held_out_ids = {task.id for task in shuffled[:number]}
    return Tasks(
        tuple(task for task in tasks if task.id not in held_out_ids),
        tuple(task for task in tasks if task.id in held_out_ids),
        config.seed,
    )


def read_task_file(path: Path) -> tuple[Task, ...]:
    """Read a file with one JSON object a line. A task without an `id` gets one from its content."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"`tasks`: {path}: {error.strerror}") from error
    inputs = [(number, _task_input(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not inputs:
        raise ConfigError(f"`tasks`: {path} has no tasks: write one JSON object a line")
    seen: dict[str, int] = {}
    tasks = []
    for number, task_input in inputs:
        task = _task(path, number, task_input)
        if task.id in seen:
            raise ConfigError(f"{path}:{number}: the same task as in line {seen[task.id]}, by its `id` or its content")
        seen[task.id] = number
        tasks.append(task)
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


def _task_input(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        task_input = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: this line is not JSON: {error}") from error
    if not isinstance(task_input, dict):
        raise ConfigError(f'{path}:{number}: a task is a JSON object, as in {{"question": ...}}')
    return task_input


def _task(path: Path, number: int, task_input: dict[str, Any]) -> Task:
    if "id" not in task_input:
        content = json.dumps(task_input, sort_keys=True, ensure_ascii=False).encode()
        return Task(blake2b(content, digest_size=8).hexdigest(), task_input)
    try:
        id = msgspec.convert(str(task_input["id"]), Id)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{number}: {task_input['id']!r} cannot be an id: write {ID_RULE}") from error
    if len(id) > MAX_ID_LENGTH:
        raise ConfigError(f"{path}:{number}: an `id` has {MAX_ID_LENGTH} characters at the most, this one {len(id)}")
    return Task(id, task_input)
