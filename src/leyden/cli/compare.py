"""`leyden compare`: the difference between two evaluations of the same tasks, with its standard error."""

import argparse
from contextlib import suppress

from rich.markup import escape

from leyden.api.client import RemoteError
from leyden.api.views import EvaluationQuery
from leyden.cli.arguments import integer, run_name
from leyden.cli.policies import PolicySummary, policies_table, summarise_policies
from leyden.cli.printing import plural, print_json, print_table, stdout_console
from leyden.cli.source import add_source, open_source
from leyden.estimates import estimate, with_error
from leyden.store.read.evaluations import compare_evaluations


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden compare`."""
    command.add_argument("first", metavar="RUN", type=run_name)
    command.add_argument("second", metavar="OTHER", type=run_name)
    command.add_argument(
        "--steps",
        nargs=2,
        type=integer(0, 2**31 - 1),
        metavar=("STEP", "STEP"),
        help="the evaluations to compare, by their steps (default: the last of each run)",
    )
    add_source(command)
    command.set_defaults(run=_compare)


async def _compare(options: argparse.Namespace) -> None:
    steps = options.steps or (None, None)
    found, policies = [], dict[str, dict[str, PolicySummary]]()
    for run, step in zip((options.first, options.second), steps, strict=True):
        async with open_source(options, run) as source:
            found.append(await source.read_evaluation(run, EvaluationQuery(step)))
            with suppress(RemoteError):  # a server that runs without keys refuses cards
                policies[run] = await summarise_policies(source, run, await source.run_card(run))
    first, second = found
    comparison = compare_evaluations(first, second)
    if options.json:
        print_json(comparison)
        return
    result = comparison.result
    console = stdout_console()
    both = first.rewards.keys() & second.rewards.keys()
    for one in (first, second):
        if (mean := estimate({task: one.rewards[task] for task in both})) is not None:
            reward, rollouts = with_error(mean.mean, mean.error), plural(mean.rollouts, "rollout")
            console.print(f"{one.name}: reward {reward} ({rollouts})", soft_wrap=True)
    error = f" ± {result.error:.3f}" if result.error is not None else ""
    direction = escape(f"{second.name} minus {first.name}")
    left = f"; {plural(result.unmatched, 'task')} of only one of them left out" if result.unmatched else ""
    console.print(
        f"{direction}: [bold]{result.difference:+.3f}{error}[/], in pairs over {plural(result.tasks, 'task')}{left}",
        soft_wrap=True,
    )
    both_runs = {f"{run}: {name}": one for run, of_run in policies.items() for name, one in of_run.items()}
    if both_runs:
        print_table(console, policies_table(both_runs))
