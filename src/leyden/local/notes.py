"""Prints lines for the user on stderr, all with one console, so that they do not break the progress that it shows."""

from functools import cache

from rich.console import Console


@cache
def stderr_console() -> Console:
    """Return the console on stderr."""
    return Console(stderr=True)


def print_note(message: str) -> None:
    """Print a line as it is, without markup and not wrapped."""
    stderr_console().print(message, highlight=False, soft_wrap=True, markup=False)
