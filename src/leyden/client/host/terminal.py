"""Lets `breakpoint()` in an agent use the terminal of the command that runs it, of which its process has none."""

import os
import pdb
import sys
from collections.abc import MutableMapping
from pathlib import Path

_TERMINAL = "LEYDEN_TERMINAL"


def lend_terminal(environment: MutableMapping[str, str], terminal: int) -> None:
    """Let agents that inherit an environment debug in the terminal of a file descriptor, unless it says how already."""
    environment[_TERMINAL] = os.ttyname(terminal)
    environment.setdefault("PYTHONBREAKPOINT", f"{__name__}.debug")


def debug() -> None:
    """Start the debugger in the calling function."""
    terminal = Path(os.environ[_TERMINAL])  # by its name: agents run in sessions of their own
    pdb.Pdb(stdin=terminal.open(), stdout=terminal.open("w")).set_trace(sys._getframe(1))
