"""`leyden rescore`: computes the rewards of a run's finished rollouts again, with the same or another function."""

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leyden.cli.arguments import integer, run_name
from leyden.cli.printing import print_json, print_table, stdout_console
from leyden.cli.source import add_source, open_source, open_writable
from leyden.client.rewards.function import RewardFunction, load_reward
from leyden.client.rewards.rescorer import EpisodeSource, RescoredRollout, Rescorer
from leyden.client.services.registry import ServiceRegistry
from leyden.config import Config, ConfigError, read_config
from leyden.config.schema import RolloutConfig
from leyden.records import Run
from leyden.user_code.bridge import background_loop

_SHOWN_ERRORS = 3


def add_rescore(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden rescore`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("--reward", metavar="MODULE:NAME", help="the reward function (default: the run's own)")
    command.add_argument("--base", metavar="DIR", help="the folder it is loaded from (default: the run's)")
    command.add_argument("--dry-run", action="store_true", help="compute and compare, without writing")
    command.add_argument(
        "--concurrency", "--at-once", type=integer(1, 1000), default=8, help="groups scored concurrently (default: 8)"
    )
    add_source(command)
    command.set_defaults(run=_rescore)


async def _rescore(options: argparse.Namespace) -> None:
    opened = (open_source if options.dry_run else open_writable)(options, options.name)
    async with cast(AbstractAsyncContextManager[Any], opened) as source:
        config = _config(await source.get_run(options.name))
        reference, reward = _reward(options, config)
        async with _services(config, reward) as services:
            rescorer = Rescorer(cast(EpisodeSource, source), options.name, reward, reference, services, options.dry_run)
            done = await _collect(rescorer.rescore(options.concurrency))
    if options.json:
        print_json({"source": rescorer.source, "dry_run": options.dry_run, "rollouts": done})
    else:
        _print(stdout_console(), done, rescorer.source, options.dry_run)
    if done and all(one.error for one in done):
        raise ConfigError(f"none of {len(done)} rollouts could be scored")


async def _collect(rescoring: AsyncIterator[RescoredRollout]) -> list[RescoredRollout]:
    """Collect the rescored rollouts, showing their number on a terminal."""
    done: list[RescoredRollout] = []
    with Console(stderr=True).status("scoring") as status:
        async for one in rescoring:
            done.append(one)
            status.update(f"{len(done)} rollouts scored")
    return done


def _reward(options: argparse.Namespace, config: Config | None) -> tuple[str, RewardFunction]:
    """Load the reward function: from the command line and the working directory, or as the run has it."""
    reference, base = options.reward, options.base or str(Path.cwd())
    if reference is None:
        if config is None or config.reward is None:
            raise ConfigError("the run has no reward function: name one with --reward")
        reference, base = config.reward, options.base or config.base
    rollout, services = (config.rollout, tuple(config.services)) if config else (RolloutConfig(), ())
    return reference, load_reward(reference, base, rollout, services)


def _services(config: Config | None, reward: RewardFunction) -> ServiceRegistry:
    """Return the services of the run that the reward function uses."""
    if config is None:
        return ServiceRegistry({})
    used = {name: service for name, service in config.services.items() if name in reward.services}
    objects = ServiceRegistry.objects(used, reward.services, config.base, loop=background_loop())
    return ServiceRegistry.commands(used, config.base) | objects


def _config(run: Run) -> Config | None:
    """Return the configuration of a run, if it has one."""
    try:
        return read_config(run.config) if isinstance(run.config, dict) else None
    except ConfigError:  # written by another program or version
        return None


def _print(console: Console, done: Sequence[RescoredRollout], source: str, dry: bool) -> None:
    if not done:
        console.print("nothing to score: no rollout of the run has succeeded")
        return
    columns = ("", "rollouts", "mean before", "mean after", "changed", "new", "no reward", "failed")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for purpose in sorted({one.purpose for one in done}):
        some = [one for one in done if one.purpose is purpose]
        table.add_row(
            str(purpose),
            str(len(some)),
            _mean([one.before for one in some]),
            _mean([one.after for one in some]),
            str(sum(one.before is not None and one.before != one.after for one in some)),
            str(sum(one.before is None and one.after is not None for one in some)),
            str(sum(one.unrewarded for one in some)),
            str(sum(bool(one.error) for one in some)),
        )
    print_table(console, table)
    for error in list(dict.fromkeys(one.error for one in done if one.error))[:_SHOWN_ERRORS]:
        console.print(Text(error, style="yellow"))
    note = "nothing was written" if dry else f"the new rewards (source {source!r}) are in effect; the old ones are kept"
    console.print(note)


def _mean(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{fmean(found):.3f}" if found else "-"
