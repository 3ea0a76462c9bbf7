"""Shows on a terminal what a command waits for, in one line that the next output replaces; elsewhere nothing."""

from typing import Self

from rich.console import Console
from rich.status import Status


class ProgressLine:
    """A line at the bottom of a terminal. As a context, it is removed at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, text: str) -> None:
        """Replace the line."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def close(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()
            self._status = None
