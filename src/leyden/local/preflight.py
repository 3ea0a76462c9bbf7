"""Checks what a user wrote before torch is imported, which takes seconds, and prints the first line of a run."""

from collections.abc import Callable
from pathlib import Path

from leyden.client.agent_reference import AgentKind, kind_of, read_command
from leyden.config import Config, ConfigError
from leyden.loading import LoadError, check_reference
from leyden.local.notes import print_note
from leyden.trainer.rollouts.tasks import read_task_file, read_tasks

ResumeCheck = Callable[[Config], None]


def check_inputs(
    config: Config, evaluated: str | None = None, model: str | None = None, resuming: ResumeCheck | None = None
) -> None:
    """Check tasks, agent and reward, and print how many tasks there are and which model is loaded next.

    `evaluated` is a file whose tasks are all evaluated; `model` replaces the configuration's. `resuming` checks last
    whether an earlier run can go on.
    """
    if evaluated is not None:
        counted = f"{len(read_task_file(Path(config.base) / evaluated))} to evaluate"
    else:
        tasks = read_tasks(config)
        counted = f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"
    for name, reference in (("agent", config.agent), ("reward", config.reward)):
        try:
            if reference:
                _check(reference, config.base, name == "agent")
        except LoadError as error:
            raise ConfigError(f"`{name}`: {error}") from error
    if resuming is not None:
        resuming(config)
    print_loading(model or config.model, f"tasks: {counted}; ")


def print_loading(model: str, before: str = "") -> None:
    """Print what is loaded next: importing torch takes seconds."""
    print_note(f"{before}loading torch and {model}")


def _check(reference: str, base: str, agent: bool) -> None:
    kind = kind_of(reference, base) if agent else AgentKind.PYTHON
    if kind is AgentKind.COMMAND:
        read_command(reference, base)
    elif kind is AgentKind.PYTHON:
        check_reference(reference, base)
