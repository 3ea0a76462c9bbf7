"""Digests of the files that a run depends on, by which an edit between two starts of the run is noticed.

Code is every Python file beside the agent's and the reward's, and in the folders there; of a command, the files that it
names. Whether an edit of code matters is for the user to judge; with other tasks, held-out ones may have been trained
on.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b, file_digest
from pathlib import Path

from msgspec import Struct

from leyden.config import Config
from leyden.user_code.loading import AgentKind, kind_of
from leyden.user_code.task_files import task_files


class Fingerprint(Struct, frozen=True):
    """Digests of files, by their paths from the folder of the configuration."""

    code: dict[str, str]
    tasks: dict[str, str]


def fingerprint(config: Config) -> Fingerprint:
    """Compute the digests of code and task files.

    Installed packages and endpoints have none, and functions of a notebook have a digest in the name of their file.
    """
    base = Path(config.base)
    code = (file for reference in (config.agent, config.reward) if reference for file in _code_files(reference, base))
    named = (base / named for named in (config.tasks, config.held_out, config.test) if isinstance(named, str))
    tasks = (file for path in named for file in task_files(path))
    return Fingerprint(_digests(code, base), _digests(tasks, base))


def edited_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files that were edited or deleted. A new file counts only if another one has begun to use it."""
    return sorted(name for name, digest in before.items() if now.get(name) != digest)


def _code_files(reference: str, base: Path) -> Iterator[Path]:
    kind = kind_of(reference, str(base))
    if kind is AgentKind.COMMAND:
        yield from (base / word for word in shlex.split(reference))
    elif kind is AgentKind.PYTHON and not reference.endswith(".pkl"):
        source = reference.rpartition(":")[0]
        file = base / (source if source.endswith(".py") else f"{source.replace('.', '/')}.py")
        package = file.with_suffix("") / "__init__.py"
        if file.is_file() or package.is_file():  # not an installed package
            folder = file.parent if file.is_file() else package.parent
            beside = {folder} if source.endswith(".py") else {folder, base}
            yield from sorted({file for one in beside for depth in ("*.py", "*/*.py") for file in one.glob(depth)})


def _digests(files: Iterable[Path], base: Path) -> dict[str, str]:
    """Return the digests of those that can be read: what the run uses of others says so itself."""
    found = {}
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            name = str(path.relative_to(base) if path.is_relative_to(base) else path)
            found[name] = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
    return found
