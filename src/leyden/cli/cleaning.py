"""`leyden delete` and `leyden prune`: free the disk of runs that are no longer needed, or of parts of them."""

import argparse
import sys

from leyden.cli.arguments import integer, run_name
from leyden.cli.printing import format_bytes, print_json, stdout_console
from leyden.cli.source import add_source, local_folder, open_writable
from leyden.config import ConfigError
from leyden.runs.pruning import PRUNABLE, prune_run
from leyden.runs.run_checkpoints import require_run_folder
from leyden.runs.run_folder import RunFolder, folder_size
from leyden.runs.stored_runs import has_only_others


def add_delete(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden delete`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("--yes", action="store_true", help="do not ask")
    add_source(command)
    command.set_defaults(run=_delete)


def add_prune(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden prune`."""
    command.add_argument("names", metavar="RUN", type=run_name, nargs="+")
    for part in PRUNABLE:
        command.add_argument(f"--{part}", action="store_true", help=f"delete old {part}")
    command.add_argument(
        "--keep", type=integer(1, 1000), default=1, help="how many of the newest checkpoints to keep (default: 1)"
    )
    command.set_defaults(run=_prune)


async def _delete(options: argparse.Namespace) -> None:
    folder = local_folder(options)
    if folder is not None and has_only_others(folder):
        folder = None
    if not options.yes and not sys.stdin.isatty():
        raise ConfigError("nothing was deleted: without a terminal to ask on, confirm it with --yes")
    if not options.yes and not _confirmed(options.name):
        raise ConfigError("nothing was deleted")
    size = folder_size(folder) if folder is not None else None
    if folder is not None:
        RunFolder(folder).delete()
    else:
        async with open_writable(options, options.name) as found:
            await found.delete_run(options.name)
    if options.json:
        print_json({"run": options.name, "freed_bytes": size})
        return
    freed = "" if size is None else f", which freed {format_bytes(size)}"
    stdout_console().print(f"{options.name} is deleted{freed}", soft_wrap=True)


def _confirmed(name: str) -> bool:
    return input(f"delete run {name} with its checkpoints and everything recorded? [y/N] ").strip().lower() == "y"


async def _prune(options: argparse.Namespace) -> None:
    chosen = [part for part in PRUNABLE if getattr(options, part)]
    freed: dict[str, int] = {}
    for name in options.names:
        freed[name] = await prune_run(require_run_folder(options.home, name), chosen or PRUNABLE, options.keep)
    if options.json:
        print_json(freed)
        return
    for name, size in freed.items():
        stdout_console().print(f"{name}: freed {format_bytes(size)}", soft_wrap=True)
