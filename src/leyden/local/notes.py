"""Prints lines for the user on stderr. All use one console: lines do not break the progress that it shows."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

_LOG_WIDTH = 1000


class NoteConsole(Console):
    """The console on stderr. What is printed on it goes to the log as well, while one is open."""

    log_file: Console | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; on a full disk the log does without them."""
        super().print(*objects, **options)
        if self.log_file is not None:
            with suppress(OSError):
                self.log_file.print(time.strftime("%Y-%m-%d %H:%M:%S"), *objects, **options)


@cache
def stderr_console() -> NoteConsole:
    """Return the console on stderr."""
    return NoteConsole(stderr=True)


@contextmanager
def notes_logged(path: Path) -> Iterator[None]:
    """Append what is printed to a file that only this user can read, within this context."""
    console = stderr_console()
    path.touch(mode=0o600)
    file = path.open("a", encoding="utf-8")
    console.log_file = Console(file=file, width=_LOG_WIDTH)
    try:
        yield
    finally:
        console.log_file = None
        with suppress(OSError):
            file.close()


def print_note(message: str) -> None:
    """Print a line as it is, without markup and not wrapped."""
    stderr_console().print(message, highlight=False, soft_wrap=True, markup=False)
