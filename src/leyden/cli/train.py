"""`leyden train`, `eval`, `dev` and `export`. torch is imported only when one of them runs."""

import argparse
import os
import shlex
import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape

from leyden.cli.arguments import integer, run_name
from leyden.cli.dev import format_counts, print_report
from leyden.cli.printing import plural, print_json, stdout_console
from leyden.config import Config, ConfigError, read_config, read_file
from leyden.documentation import page
from leyden.estimates import with_error
from leyden.extras import install_command
from leyden.learner.ranks.launch import join, launch_of
from leyden.local.preflight import check_inputs
from leyden.models.source import BUNDLED
from leyden.outcomes import Ending
from leyden.process.resources import configure_openmp
from leyden.rl.registry import KINDS
from leyden.runs.run_checkpoints import find_checkpoint, require_run_folder, with_model
from leyden.runs.run_folder import RunFolder
from leyden.runs.run_names import STORE_NAME

if TYPE_CHECKING:
    from leyden.local.train import TrainingResult

_STOP_S = 5.0
"""How long the processes of a run may take to end after the second Ctrl-C."""


def add_train(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden train`."""
    add_configuration(command)
    command.add_argument("--restart", action="store_true", help="start from scratch; the earlier run is moved aside")
    command.add_argument(
        "--accept-changes", action="store_true", help="continue although the file of the tasks was edited"
    )
    add_ray(command, "train, sample and run agents on the nodes of a Ray cluster, of which this machine is one")
    command.set_defaults(run=_train)


def add_eval(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden eval`."""
    add_configuration(command)
    command.add_argument("--model", help="a model, a run, or runs/NAME/step-N (default: the configuration's model)")
    command.add_argument("--step", help="with --model RUN: best, last, or a number (default: best)")
    command.add_argument("--tasks", metavar="FILE", type=_absolute_file, help="evaluate on these tasks instead")
    command.set_defaults(run=_eval)


def add_dev(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden dev`."""
    add_configuration(command)
    command.add_argument("--tasks", type=integer(1, 1000), default=4, help="how many tasks (default: 4)")
    command.add_argument("--rollouts", type=integer(1, 1000), default=2, help="rollouts of each (default: 2)")
    how = "then run each rollout again, answered from its record, and say what differs"
    command.add_argument("--replay", action="store_true", help=how)
    command.set_defaults(run=_dev)


def add_export(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden export`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write")
    command.add_argument("--step", default="best", help="best, last, or a number (default: best)")
    command.add_argument("--policy", metavar="NAME", help="which one, if the run trains several policies")
    command.add_argument(
        "--push", metavar="NAME", help="also upload it to the Hugging Face Hub, as USER/MODEL (private)"
    )
    command.set_defaults(run=_export)


def add_configuration(command: argparse.ArgumentParser) -> None:
    """Add a configuration, with the settings that override those in it."""
    command.add_argument("config", type=Path, metavar="CONFIG.toml")
    add_settings(command)


def add_ray(command: argparse.ArgumentParser, about: str) -> Any:
    """Add the options that name a Ray cluster; return their group."""
    cluster = command.add_argument_group("on a Ray cluster")
    cluster.add_argument("--ray", action="store_true", help=about)
    cluster.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        default=os.environ.get("RAY_ADDRESS") or "auto",
        help="the cluster (or set RAY_ADDRESS; default: the one that this machine is part of)",
    )
    return cluster


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add the settings that override those of a configuration."""
    command.add_argument(
        "settings", nargs="*", default=[], metavar="KEY=VALUE", help="override a setting, as in training.steps=20"
    )


def configuration(options: argparse.Namespace) -> Config:
    """Read the configuration of a command, with its overrides."""
    document = read_file(options.config, [*map(from_here, options.settings)])
    document.setdefault("home", str(options.home))
    return read_config(document)


_FILES = ("tasks", "held_out", "test")
_FUNCTIONS = ("agent", "reward", "signals.rule", *(f"algorithm.{kind}" for kind in KINDS))


def from_here(setting: str) -> str:
    """Return a setting of the command line with its path absolute: there, paths are relative to the current folder."""
    key, equals, value = setting.partition("=")
    file = value.rpartition(":")[0]
    is_file = key in _FILES and Path(value).is_file()
    is_function = key in _FUNCTIONS and file.endswith(".py") and " " not in file and Path(file).is_file()
    is_model = key == "model" or (key.startswith("policies.") and key.endswith(".model"))
    if is_file or is_function or is_model:
        value = absolute(value) if is_model else str(Path(value).absolute())
    return f"{key}{equals}{value}"


def _absolute_file(text: str) -> str:
    return str(Path(text).absolute())


def absolute(model: str) -> str:
    """Return the absolute path of a model's folder, or the name of a model as it is."""
    return str(Path(model).resolve()) if model not in BUNDLED and Path(model).is_dir() else model


def needs_torch() -> None:
    """Raise unless the packages for training are installed; configure the threads of torch."""
    configure_openmp()
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigError(f"training needs {package}: {install_command('train')}")


async def _train(options: argparse.Namespace) -> None:
    if (launch := launch_of(os.environ)) is not None and launch.rank > 0:
        needs_torch()
        join(launch)
        return
    config = configuration(options)
    if launch is not None:
        config = launch.configured(config)
    resuming = partial(RunFolder.of(config).check, accept_changes=options.accept_changes)
    check_inputs(config, resuming=None if options.restart else resuming)
    needs_torch()
    from leyden.local.train import train

    trained = await train(
        config,
        options.restart,
        accept_changes=options.accept_changes,
        on_second_interrupt=lambda: exit_within(_STOP_S, options),
        worker_command=shlex.join(["leyden", "worker", str(options.config), *options.settings]),
        ray_address=options.ray_address if options.ray else None,
    )
    if options.json:
        print_json(trained)
    else:
        _print_result(trained, options)
    if trained.steps and trained.step == trained.steps and not trained.updates:
        from leyden.learner.errors import TrainingError

        raise TrainingError(
            f"run {trained.run} made no update in {plural(trained.step, 'step')}, so nothing was trained: in every "
            f"group all rollouts were worth the same ({page('when_it_does_not_learn')})"
        )


def _print_result(trained: "TrainingResult", options: argparse.Namespace) -> None:
    console = stdout_console()
    if trained.before is not None:
        console.print(_learned(trained), soft_wrap=True)
    if trained.best is not None and trained.best_step:
        optimistic = "optimistic, because this step was chosen by it; `test` tasks give an unbiased one"
        best = f"held-out reward {with_error(trained.best, trained.best_error)} ({optimistic})"
        console.print(f"best checkpoint: step {trained.best_step}, {best}", soft_wrap=True)
    elif trained.best_step == 0 and trained.after is not None:
        console.print("no checkpoint was better on the held-out tasks than the model before training")
    if trained.test is not None:
        test = with_error(trained.test, trained.test_error)
        if trained.best_step == 0:
            test = f"{test} of the model before training"
        console.print(f"test reward {test}, measured once", soft_wrap=True)
    if trained.standstill is not None:
        console.print(f"[yellow]{escape(trained.standstill)}[/]", soft_wrap=True)
    if trained.step < trained.steps:
        state = f"stopped at step {trained.step} of {trained.steps}"
    elif trained.step > trained.steps > 0:
        state = f"is done: it was at step {trained.step} already, and `training.steps` is {trained.steps}"
    else:
        state = "is done" if trained.updates or not trained.steps else "ended without an update"
    console.print(f"run [bold]{trained.run}[/] {state}: {trained.folder}", soft_wrap=True)
    if trained.step < trained.steps:
        console.print(f"continue with: {resume_command(options)}", soft_wrap=True)
    if (trained.folder / STORE_NAME).exists():  # otherwise it is in another database
        home = shlex.quote(os.path.relpath(trained.folder.parent))
        command = "leyden serve" if home == "runs" else f"leyden serve --home {home}"
        console.print(f"see it in the browser with: {command}", soft_wrap=True)


def _learned(trained: "TrainingResult") -> str:
    """Return the held-out reward before and after with errors, and the paired difference."""
    before = f"held-out reward {with_error(trained.before, trained.before_error)} before"
    if trained.after is None:
        return f"{before}, not evaluated since"
    after = f"{with_error(trained.after, trained.after_error)} after"
    text = f"{before}, {after} (mean of {plural(trained.counted, 'rollout')})"
    if trained.change is None:
        return text
    sign = "+" if trained.change > 0 else ""
    return f"{text}: {sign}{with_error(trained.change, trained.change_error)} in pairs of tasks"


def exit_within(seconds: float, options: argparse.Namespace) -> None:
    """End this process after some seconds, if it has not ended by then. The processes of the run end with it."""
    timer = threading.Timer(seconds, exit_at_once, (options,))
    timer.daemon = True
    timer.start()


def exit_at_once(options: argparse.Namespace) -> NoReturn:
    """Print how to continue and end this process without waiting for its threads: one may compute an update."""
    Console(stderr=True).show_cursor()  # the report of a step hides it
    sys.stderr.write(f"leyden: stopped; continue with: {resume_command(options)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def resume_command(options: argparse.Namespace) -> str:
    """Return the command that continues a run: the same command without `--restart`."""
    return shlex.join(["leyden", *(word for word in options.words if not word.startswith("--re"))])


async def _eval(options: argparse.Namespace) -> None:
    config, model = configuration(options), None
    if options.model and config.policies:
        config = with_model(config, options.model, Path(config.home), options.step)
    elif options.model:
        model = find_checkpoint(options.model, Path(config.home), options.step) or absolute(options.model)
    elif options.step is not None:
        raise ConfigError("--step is for --model RUN")
    check_inputs(config, options.tasks, model)
    needs_torch()
    from leyden.local.evaluate import evaluate_model

    done = await evaluate_model(config, model, options.tasks)
    if options.json:
        print_json(done)
        return
    outcomes = ", ".join(f"{count} {ending.replace('_', ' ')}" for ending, count in done.outcomes.items())
    reward = "none" if done.reward is None else with_error(done.reward, done.error)
    solved = "".join(f", pass@{k} {share:.3f}" for k, share in done.pass_at.items())
    stdout_console().print(
        f"{done.model} on {plural(done.tasks, 'task')}: reward [bold]{reward}[/]{solved} ({outcomes})\n{done.folder}",
        soft_wrap=True,
    )


async def _dev(options: argparse.Namespace) -> None:
    config = configuration(options)
    check_inputs(config)
    needs_torch()
    from leyden.local.dev import run_dev

    report, episodes = await run_dev(config, options.tasks, options.rollouts, options.replay)
    if options.json:
        print_json(report)
    else:
        print_report(stdout_console(), report, episodes)
    message, count = next(iter(report.messages.items()), ("", report.rollouts))
    first, _, _ = message.partition("\n")
    if not report.calls_trained and not report.groups_flat:
        if not report.calls:
            from leyden.orchestrator.health.failures import no_calls

            raise ConfigError(no_calls(first if report.failures else None))
        why = f": {first}" if first else ""
        if any("role not selected" in reason for reason in report.left_out):
            from leyden.orchestrator.health.roles import no_such_roles

            why = f": {no_such_roles(report.roles)}"
        raise ConfigError(f"no call can be trained on ({format_counts(report.left_out)}){why}")
    if Ending.SUCCEEDED not in report.outcomes:
        raise ConfigError(f"no rollout succeeded; {count} of {report.rollouts} ended with: {first}")


async def _export(options: argparse.Namespace) -> None:
    needs_torch()
    from leyden.local.export import export

    checkpoint = export(require_run_folder(options.home, options.name), options.to, options.step, options.policy)
    pushed = None
    if options.push:
        from leyden.local.model_card import push

        pushed = push(options.to, options.push)
    if options.json:
        print_json({"checkpoint": checkpoint, "to": options.to, "pushed": pushed})
    else:
        place = f"{options.to}, and {pushed}" if pushed else options.to
        stdout_console().print(f"{checkpoint} is now {place}", highlight=False, soft_wrap=True)
