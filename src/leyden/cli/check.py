"""`leyden check`: verifies what a run keeps."""

import argparse

from leyden.cli.arguments import run_name
from leyden.cli.printing import print_json, stdout_console
from leyden.config import ConfigError
from leyden.runs.check import check_run
from leyden.runs.run_checkpoints import require_run_folder


def add_check(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden check`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.set_defaults(run=_check)


async def _check(options: argparse.Namespace) -> None:
    parts = check_run(require_run_folder(options.home, options.name))
    if options.json:
        print_json(parts)
    else:
        console = stdout_console()
        for part in parts:
            console.print(f"{part.name}: {part.detail}", soft_wrap=True, markup=False)
            for problem in part.problems:
                console.print(f"  {problem}", soft_wrap=True, markup=False)
    if damaged := [part.name for part in parts if part.problems]:
        raise ConfigError(f"damaged: {', '.join(damaged)}")
