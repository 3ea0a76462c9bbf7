"""`leyden replay`: runs the agent of a recorded rollout again, answered from its record."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from leyden.cli.arguments import identifier, integer, run_name
from leyden.cli.printing import plural, print_json, stdout_console
from leyden.cli.source import add_source, open_source
from leyden.cli.train import add_settings, from_here, needs_torch
from leyden.client.host.terminal import lend_terminal
from leyden.config import Config, ConfigError, override, read_config
from leyden.episodes import Episode
from leyden.local.notes import print_note
from leyden.outcomes import Ending

if TYPE_CHECKING:
    from leyden.local.replay import ReplayedRollout


_PATIENCE_S = 86_400.0
"""How long somebody may look at an agent that has stopped in the debugger."""


def add_replay(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden replay`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("rollout", metavar="ROLLOUT", type=identifier)
    add_settings(command)
    command.add_argument("--model", help="what answers calls that the record does not: a model, a run, or a checkpoint")
    command.add_argument(
        "--from",
        dest="calls",
        type=integer(1, 2**31 - 1),
        metavar="CALL",
        help="with --model: only this call and those before it are answered from the record",
    )
    add_source(command)
    command.set_defaults(run=_replay)


async def _replay(options: argparse.Namespace) -> None:
    if options.calls is not None and options.model is None:
        raise ConfigError("--from CALL goes on with a model after that call: name one with --model")
    config, recorded = await _read(options)
    needs_torch()
    from leyden.local.replay import replay_rollout

    if sys.stdin.isatty():
        lend_terminal(os.environ, sys.stdin.fileno())
        workers = replace(config.workers, drain_s=_PATIENCE_S)
        config = replace(config, rollout=replace(config.rollout, time_limit_s=_PATIENCE_S), workers=workers)
    done = await replay_rollout(config, recorded, options.calls, options.model)
    if options.json:
        print_json(done)
    else:
        _print(stdout_console(), done)
    if options.model is None and done.outcome == Ending.ENGINE_ERROR:
        print_note("a call was not in the record, and there is no model: --model NAME goes on with one")


async def _read(options: argparse.Namespace) -> tuple[Config, Episode]:
    """Read the configuration of a run, with what is overridden, and the last attempt of a rollout."""
    async with open_source(options, options.name) as source:
        run, detail = await source.get_run(options.name), await source.get_rollout(options.name, options.rollout)
        if not detail.attempts:
            raise ConfigError(f"rollout {options.rollout} was not started yet, so there is nothing to replay")
        recorded = await source.get_episode(options.name, detail.attempts[-1].id)
    if not isinstance(run.config, dict):
        raise ConfigError(f"run {options.name!r} has no configuration that names an agent, so none can be replayed")
    config = read_config(override(run.config, map(from_here, options.settings)))
    return replace(config, home=str(options.home)), recorded


def _print(console: Console, done: "ReplayedRollout") -> None:
    sampled = f", {plural(done.sampled, 'call')} sampled after them" if done.sampled else ""
    lines = [f"replayed {done.replayed} of {plural(done.calls, 'call')}{sampled}"]
    if done.difference is not None:
        lines.append(f"[yellow]left the record: {escape(done.difference)}[/]")
    message = f": {escape(done.message.partition(chr(10))[0])}" if done.message else ""
    lines.append(f"outcome {done.outcome}{message}")
    lines.append(f"reward {_number(done.reward)}, recorded {_number(done.reward_recorded)}")
    lines.append(f"leyden show {done.run} replay.0")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
