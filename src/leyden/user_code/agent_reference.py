"""Determines the kind of agent that a reference names: Python code, a command, or an HTTP endpoint."""

import os
import shlex
import shutil
from enum import Enum
from pathlib import Path

from leyden.user_code.loading import LoadError


class AgentKind(Enum):
    """The kind of an agent, which decides how it is run."""

    PYTHON = "a function or a class"
    COMMAND = "a command"
    ENDPOINT = "an HTTP endpoint"


def kind_of(reference: str, base: str) -> AgentKind:
    """Determine the kind from the form of the reference and the files in the folder `base`."""
    if reference.startswith(("http://", "https://")):
        return AgentKind.ENDPOINT
    file = reference.rpartition(":")[0] or reference
    if reference.endswith(".pkl") or (file.endswith(".py") and ":" in reference and Path(base, file).is_file()):
        return AgentKind.PYTHON  # a path may contain spaces
    if len(reference.split()) > 1:
        return AgentKind.COMMAND
    if ":" not in reference and (Path(base, reference).is_file() or shutil.which(reference)):
        return AgentKind.COMMAND
    return AgentKind.PYTHON


def read_command(reference: str, base: str) -> list[str]:
    """Split a command as a shell does. The program is searched in `base`, then on PATH."""
    try:
        program, *arguments = shlex.split(reference)
    except ValueError as error:
        raise LoadError(f"the command {reference!r} cannot be read: {error}") from error
    local = Path(base, program).absolute()  # not resolved: the python of a virtual environment is a symlink
    if local.is_file():
        if not os.access(local, os.X_OK):
            raise LoadError(f"{program!r} is not executable: chmod +x it, or write its interpreter before it")
        return [str(local), *arguments]
    found = shutil.which(program) if "/" not in program else None
    if found is None:
        raise LoadError(f"the command {reference!r} cannot be run: there is no {program!r} in {base} or on PATH")
    return [found, *arguments]
