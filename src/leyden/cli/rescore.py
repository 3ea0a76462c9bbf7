"""`leyden rescore`: another reward function on the rollouts that a run has, or the same once more."""

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

from leyden.cli.arguments import identifier, whole
from leyden.cli.printing import console_of_stdout, print_json, print_table
from leyden.cli.source import add_source, archive, source
from leyden.client.rewards.function import RetryPolicy, RewardFunction, load_reward
from leyden.client.rewards.rescorer import EpisodeSource, RescoredRollout, Rescorer
from leyden.client.services.registry import ServiceRegistry
from leyden.client.user_code import background_loop
from leyden.config import Config, ConfigError, read_stored_config
from leyden.records import Run

_SHOWN_ERRORS = 3


def add_rescore(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    command: argparse.ArgumentParser = commands.add_parser("rescore", help="compute the rewards of a run again")
    command.add_argument("name", metavar="RUN", type=identifier)
    command.add_argument("--reward", metavar="MODULE:NAME", help="the reward function (default: the run's own)")
    command.add_argument(
        "--base", metavar="DIR", help="where it is looked for (default: the run's own folder of files)"
    )
    command.add_argument("--dry-run", action="store_true", help="compute and compare, and write nothing")
    command.add_argument("--at-once", type=whole(1, 1000), default=8, help="groups at once (default: 8)")
    add_source(command)
    command.set_defaults(run=_rescore)
    return command


async def _rescore(options: argparse.Namespace) -> None:
    opened = source(options, options.name) if options.dry_run else archive(options, options.name)
    async with cast(AbstractAsyncContextManager[Any], opened) as record:
        config = _config(await record.run(options.name))
        reference, reward = _reward(options, config)
        async with _services(config, reward) as services:
            rescorer = Rescorer(cast(EpisodeSource, record), options.name, reward, reference, services, options.dry_run)
            done = await _follow(rescorer.rescore(options.at_once))
    if options.json:
        print_json({"source": rescorer.source, "dry_run": options.dry_run, "rollouts": done})
    else:
        _print(console_of_stdout(), done, rescorer.source, options.dry_run)
    if done and all(one.error for one in done):
        raise ConfigError(f"none of {len(done)} rollouts could be scored")


async def _follow(rescoring: AsyncIterator[RescoredRollout]) -> list[RescoredRollout]:
    """All of them, with their number on a terminal meanwhile."""
    done: list[RescoredRollout] = []
    with Console(stderr=True).status("scoring") as status:
        async for one in rescoring:
            done.append(one)
            status.update(f"{len(done)} rollouts scored")
    return done


def _reward(options: argparse.Namespace, config: Config | None) -> tuple[str, RewardFunction]:
    """The run's own function is where it was; one that is named here is looked for here."""
    reference, base = options.reward, options.base or str(Path.cwd())
    if reference is None:
        if config is None or config.reward is None:
            raise ConfigError("the run has no reward function of its own: name one with --reward")
        reference, base = config.reward, options.base or config.base
    patience = RetryPolicy(config.rollout.reward_time_limit_s, config.rollout.reward_tries) if config else RetryPolicy()
    return reference, load_reward(reference, base, patience, tuple(config.services) if config else ())


def _services(config: Config | None, reward: RewardFunction) -> ServiceRegistry:
    """Those that the function asks for, of the run's."""
    if config is None:
        return ServiceRegistry({})
    asked = {name: service for name, service in config.services.items() if name in reward.services}
    made = ServiceRegistry.objects(asked, reward.services, config.base, loop=background_loop())
    return ServiceRegistry.commands(asked, config.base) | made


def _config(run: Run) -> Config | None:
    """The configuration that a run was trained with, where it was."""
    try:
        return read_stored_config(run.config) if isinstance(run.config, dict) else None
    except ConfigError:  # of another program, or of another day
        return None


def _print(console: Console, done: Sequence[RescoredRollout], source: str, dry: bool) -> None:
    if not done:
        console.print("there is nothing to score: no rollout of the run has succeeded")
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
    wrote = "nothing was written" if dry else f"the new rewards are in force, from {source!r}; the old ones stay"
    console.print(wrote, highlight=False)


def _mean(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{fmean(found):.3f}" if found else "-"
