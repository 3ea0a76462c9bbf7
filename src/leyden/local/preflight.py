"""Checks what a user wrote before torch is imported, which takes seconds, and prints the first line of a run."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from leyden.config import Config, ConfigError, policy_configs
from leyden.local.notes import print_note
from leyden.models.source import find_local_model
from leyden.orchestrator.rollouts.tasks import read_task_file, read_tasks
from leyden.rl.registry import KINDS, UnknownAlgorithm, check_name
from leyden.server.http.address import bind_port
from leyden.server.options import ServeError
from leyden.user_code.loading import AgentKind, LoadError, check_reference, kind_of, missing_packages, read_command

ResumeCheck = Callable[[Config], None]


def check_inputs(
    config: Config, evaluated: str | None = None, model: str | None = None, resuming: ResumeCheck | None = None
) -> None:
    """Check what a configuration names, and print how many tasks there are and which model is loaded next.

    `evaluated` is a file whose tasks are all evaluated; `model` replaces the configuration's. `resuming` checks last
    whether an earlier run can go on.
    """
    if evaluated is not None:
        found = read_task_file(config, evaluated)
        counted = f"{len(found)} to evaluate"
    else:
        tasks = read_tasks(config)
        counted = f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"
    policies = policy_configs(config).values()
    for own in policies:
        _check_algorithm(own)
    for name, reference in (("agent", config.agent), ("reward", config.reward), ("signals.rule", config.signals.rule)):
        if reference:
            _check_code(name, reference, config)
    if resuming is not None:
        resuming(config)
    models = [model] if model is not None else list(dict.fromkeys(own.model for own in policies))
    for name in models:
        find_local_model(name, config.base)
    _check_writable(Path(config.home).absolute())
    _check_port(config)
    print_loading(", ".join(models), f"tasks: {counted}; ")


def print_loading(model: str, before: str = "") -> None:
    """Print what is loaded next: importing torch takes seconds."""
    print_note(f"{before}loading torch and {model}")


def _check_algorithm(config: Config) -> None:
    for kind in KINDS:
        name: str = getattr(config.algorithm, kind)
        if ":" in name:
            _check_code(f"algorithm.{kind}", name, config)
        elif not (kind == "correction" and name == "none"):
            try:
                check_name(kind, name)
            except UnknownAlgorithm as error:
                raise ConfigError(str(error)) from error


def _check_code(key: str, reference: str, config: Config) -> None:
    """Check that a reference leads to code."""
    try:
        kind = kind_of(reference, config.base) if key == "agent" else AgentKind.PYTHON
        if kind is AgentKind.COMMAND:
            read_command(reference, config.base)
        elif kind is AgentKind.PYTHON:
            check_reference(reference, config.base)
            missing = missing_packages(reference, config.base) if config.workers.processes != 0 else ()
            for package in missing:
                print_note(f"`{key}`: {reference} imports {package}, which is not installed for {sys.executable}")
    except LoadError as error:
        raise ConfigError(f"`{key}`: {error}") from error


def _check_writable(home: Path) -> None:
    """Write a temporary file into a folder, or into the nearest folder above it that exists."""
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    try:
        TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(f"`home`: {home} cannot be written to ({error.strerror}): name another folder") from error


def _check_port(config: Config) -> None:
    try:
        bind_port(config.server.host, config.server.port).close()
    except ServeError as error:
        raise ConfigError(f"`server`: {error}") from error
