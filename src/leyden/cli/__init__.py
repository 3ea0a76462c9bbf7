"""The command line. A command that fails prints one line that says what to change."""

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import uvloop

from leyden import __version__
from leyden.cli.arguments import identifier
from leyden.cli.check import add_check
from leyden.cli.cleaning import add_delete, add_prune
from leyden.cli.compare import add_compare
from leyden.cli.rescore import add_rescore
from leyden.cli.serve import add_serve
from leyden.cli.show import add_runs, add_show
from leyden.cli.train import add_dev, add_eval, add_export, add_train, resume_command
from leyden.cli.worker import add_worker
from leyden.config import ConfigError
from leyden.loading import LoadError
from leyden.remote import RemoteError, ReplyTimeout, ServerUnreachable
from leyden.server.options import ServeError
from leyden.store.errors import StoreError
from leyden.trainer.errors import TrainingError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser with all commands."""
    top = _Parser(prog="leyden", description="Train the language model behind any agent.")
    top.add_argument("--version", action="version", version=f"leyden {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    home = Path(os.environ.get("LEYDEN_HOME", "runs"))
    for add in (
        add_train,
        add_dev,
        add_eval,
        add_export,
        add_serve,
        add_worker,
        add_runs,
        add_show,
        add_compare,
        add_check,
        add_delete,
        add_prune,
        add_rescore,
    ):
        command = add(commands)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--home", type=Path, default=home, help="the folder of all runs (default: runs)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 0, 1 if it failed, or 2 for invalid arguments."""
    options = _parse(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(options.run(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if options.command == "train":
            _fail(f"stopped; continue with: {resume_command(options)}")
        return 130
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, LoadError, TrainingError, StoreError, RemoteError, ServeError) as error:
        return _fail(str(error))
    except ServerUnreachable as error:
        return _fail(f"{error}: start one with `leyden serve`, or correct --server")
    except ReplyTimeout as error:
        return _fail(f"{error}: it is overloaded or hangs; look at its log, and try again")
    except TimeoutError:  # an OSError, but nothing that the user can correct
        raise
    except OSError as error:  # such as a home folder that is a file
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(f"{error.strerror} in {options.home}: free some, and run the command again")
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, also where options stand between positional arguments, which argparse does not allow."""
    top = parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, rest = top.parse_known_args(words)
    options.words = words
    if rest and getattr(options, "rollout", "") is None:
        with suppress(argparse.ArgumentTypeError):
            options.rollout = identifier(rest[0])
            del rest[0]
    settings = [one for one in rest if hasattr(options, "settings") and "=" in one and one[0] != "-"]
    if odd := [one for one in rest if one not in settings]:
        top.error(f"unrecognized arguments: {' '.join(odd)}")
    if settings:
        options.settings += settings
    return options


def _fail(message: str) -> int:
    sys.stderr.write(f"leyden: {message}\n")
    return 1
