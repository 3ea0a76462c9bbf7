"""`leyden compare`: the difference between two evaluations of the same tasks, with its standard error."""

import argparse
from collections import defaultdict
from typing import Any

from msgspec import Struct

from leyden.cli.arguments import identifier, integer
from leyden.cli.printing import print_json, stdout_console
from leyden.cli.source import RunSource, add_source, open_source
from leyden.config import ConfigError
from leyden.estimates import PairedDifference, TaskRewards, compare
from leyden.records import Purpose

_PAGE = 1000
_EVALUATION = "eval-"
"""How the names of groups of evaluations begin; groups of test tasks are called `test-STEP-TASK`."""


class Evaluation(Struct, frozen=True):
    """One evaluation of a run."""

    run: str
    step: int | None
    """None for a run of `leyden eval`, which has no steps."""
    rewards: TaskRewards


class Comparison(Struct, frozen=True):
    """The result of `leyden compare`."""

    first: str
    second: str
    result: PairedDifference


def add_compare(commands: Any) -> argparse.ArgumentParser:
    """Add `leyden compare`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "compare", help="compare two evaluations of the same tasks, in pairs"
    )
    command.add_argument("first", metavar="RUN", type=identifier)
    command.add_argument("second", metavar="RUN", type=identifier)
    command.add_argument(
        "--steps",
        nargs=2,
        type=integer(0, 2**31 - 1),
        metavar=("STEP", "STEP"),
        help="the evaluations to compare, by their steps (default: the last of each run)",
    )
    add_source(command)
    command.set_defaults(run=_compare)
    return command


async def _compare(options: argparse.Namespace) -> None:
    steps = options.steps or (None, None)
    found = []
    for run, step in zip((options.first, options.second), steps, strict=True):
        async with open_source(options, run) as source:
            found.append(await read_evaluation(source, run, step))
    first, second = found
    result = compare(first.rewards, second.rewards)
    if result is None:
        raise ConfigError(f"{_name(first)} and {_name(second)} have no task in common: evaluate them on the same tasks")
    if options.json:
        print_json(Comparison(_name(first), _name(second), result))
        return
    console = stdout_console()
    for one, mean in ((first, result.first), (second, result.second)):
        rollouts = sum(map(len, one.rewards.values()))
        console.print(f"{_name(one)}: reward {mean:.3f} ({rollouts} rollouts)", highlight=False, soft_wrap=True)
    error = f" ± {result.error:.3f}" if result.error is not None else ""
    left = f"; {result.unmatched} tasks are in only one of them" if result.unmatched else ""
    console.print(
        f"difference [bold]{result.difference:+.3f}{error}[/], in pairs over {result.tasks} tasks{left}",
        highlight=False,
        soft_wrap=True,
    )


async def read_evaluation(source: RunSource, run: str, step: int | None) -> Evaluation:
    """Read the rewards of an evaluation of a run; by default the last one."""
    evaluations: dict[int | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    after = ""
    while page := await source.rollouts(run, after, _PAGE):
        for rollout in page:
            held_out = rollout.purpose is Purpose.EVAL and rollout.group.startswith(_EVALUATION)
            if held_out and rollout.reward is not None:
                evaluations[rollout.step][rollout.task].append(rollout.reward)
        after = page[-1].id
    if not evaluations:
        raise ConfigError(f"run {run!r} has no evaluation with a reward")
    if step is None:
        step = max(evaluations, key=lambda found: -1 if found is None else found)
    if step not in evaluations:
        known = ", ".join(str(found) for found in evaluations)
        raise ConfigError(f"run {run!r} has no evaluation of step {step}; there are those of {known}")
    return Evaluation(run, step, evaluations[step])


def _name(one: Evaluation) -> str:
    return one.run if one.step is None else f"{one.run} at step {one.step}"
