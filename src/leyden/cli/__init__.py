"""The command line. A command that fails prints one line that says what to change."""

import argparse
import asyncio
import atexit
import difflib
import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shutil import disk_usage
from typing import NoReturn

import uvloop

from leyden import __version__
from leyden.cli.arguments import default_home, identifier
from leyden.config import ConfigError
from leyden.user_code.loading import LoadError

_COMMANDS = {
    "train": ("train", "train the model behind an agent, or continue a run"),
    "dev": ("train", "run an agent a few times and report what is recorded"),
    "eval": ("train", "evaluate a model on the held-out tasks"),
    "export": ("train", "write a run's weights as a model folder"),
    "init": ("init", "write a folder to start from"),
    "demo": ("demo", "train a small agent on the bundled model"),
    "serve": ("serve", "run a server"),
    "worker": ("worker", "run agents for a remote server"),
    "runs": ("show", "list the runs"),
    "show": ("show", "show a run, or one of its rollouts"),
    "top": ("top", "watch runs and workers in the terminal"),
    "compare": ("compare", "compare two evaluations of the same tasks, in pairs"),
    "report": ("report", "write a run as one HTML file"),
    "check": ("check", "verify the database and the checkpoints of a run"),
    "rescore": ("rescore", "compute the rewards of a run again"),
    "replay": ("replay", "run the agent of a rollout again, answered from its record"),
    "delete": ("cleaning", "delete a run with everything it keeps"),
    "prune": ("cleaning", "delete old checkpoints, output and spans of runs; without an option, all three"),
}
"""By command, the module that has `add_COMMAND`, and what it does. Some modules take long to import, so only that of
the command in use is."""
_ERRORS = {
    "leyden.learner.errors": "TrainingError",
    "leyden.store.errors": "StoreError",
    "leyden.api.client": "RemoteError",
    "leyden.server.options": "ServeError",
}
"""Errors whose message is for the user, by the module that defines them."""
_HINTS = {"RUN": "`leyden runs` lists them", "CONFIG.toml": "`leyden init --from AGENT.py` writes one"}
"""What helps whoever left out an argument."""

_NEW_OBJECTS = 10_000
"""How many new objects start a collection: with Python's 700 those during imports take an eighth of torch's import."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '([^']*)'", message):
            near = difflib.get_close_matches(wrong[1], _COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}"
            message = f"{wrong[1]!r} is no command: {hint}"
        for argument, hint in _HINTS.items():
            if message.startswith(f"the following arguments are required: {argument}"):
                message += f" ({hint})"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the argument parser, with all commands or with one."""
    top = _Parser(prog="leyden", description="Train the language model behind any agent.")
    top.add_argument("--version", action="version", version=f"leyden {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    home = default_home()
    for name, (module, about) in _COMMANDS.items():
        if only in (None, name):
            command = commands.add_parser(name, help=about)
            getattr(import_module(f"leyden.cli.{module}"), f"add_{name}")(command)
            command.add_argument("--json", action="store_true", help="print JSON")
            command.add_argument("--home", type=Path, default=home, help="the folder of all runs (default: runs)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 0, 1 if it failed, or 2 for invalid arguments."""
    gc.set_threshold(_NEW_OBJECTS)
    options = _parse(arguments)
    atexit.register(gc.freeze)  # else the objects of torch and transformers are collected, for more than a second
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(options.run(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if options.command == "train":
            from leyden.cli.train import exit_at_once

            exit_at_once(options)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _expected() as error:
        return _fail(str(error))
    except _defined("leyden.api.client", "ServerUnreachable") as error:
        return _fail(f"{error}: start one with `leyden serve`, or correct --server")
    except _defined("leyden.api.client", "ReplyTimeout") as error:
        return _fail(f"{error}: it is overloaded or hangs; look at its log, and try again")
    except TimeoutError:  # an OSError, but nothing that the user can correct
        raise
    except OSError as error:  # such as a home folder that is a file
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            from leyden.cli.printing import format_bytes

            home = options.home.absolute()
            left = format_bytes(disk_usage(next(one for one in (home, *home.parents) if one.exists())).free)
            return _fail(f"{error.strerror} in {home}, {left} are left: free some, and run the command again")
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return 0


def _expected() -> tuple[type[Exception], ...]:
    found = (one for module, name in _ERRORS.items() for one in _defined(module, name))
    return ConfigError, LoadError, *found


def _defined(module: str, name: str) -> tuple[type[Exception], ...]:
    """Return an error of a module, if anything has imported the module: else it cannot have been raised."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, also if options stand between positional arguments, which argparse does not allow."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    top = parser(words[0] if words and words[0] in _COMMANDS else None)
    if not words:
        top.print_help(sys.stderr)
        top.exit(2)
    options, rest = top.parse_known_args(words)
    options.words = words
    if rest and getattr(options, "rollout", "") is None:
        with suppress(argparse.ArgumentTypeError):
            options.rollout = identifier(rest[0])
            del rest[0]
    settings = [one for one in rest if hasattr(options, "settings") and "=" in one and one[0] != "-"]
    if odd := [one for one in rest if one not in settings]:
        top.prog += f" {options.command}"
        top.error(f"unrecognized arguments: {' '.join(odd)}")
    if settings:
        options.settings = [*options.settings, *settings]
    return options


def _fail(message: str) -> int:
    sys.stderr.write(f"leyden: {message}\n")
    return 1
