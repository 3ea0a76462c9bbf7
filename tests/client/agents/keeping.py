"""Agents that are classes, which keep something costly between rollouts."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import leyden
from leyden.client.tracing.context import current_attempt

log_lock = threading.Lock()


class Kept:
    """Writes down what becomes of it."""

    made = 0

    def __init__(self) -> None:
        with log_lock:
            Kept.made += 1
            self.number = Kept.made
        self.inside = current_attempt()
        self.calls, self.busy, self.ill = 0, False, False

    def __call__(self, task: dict[str, Any], attempt: Any) -> Any:
        assert not self.busy and self.inside is None
        self.busy, self.log = True, Path(task["log"])
        try:
            return self._act(task)
        finally:
            self.busy = False

    def _act(self, task: dict[str, Any]) -> Any:
        self.calls += 1
        time.sleep(task.get("s", 0))
        if task.get("do") == "raise":
            self.ill = task["ill"]
            raise ValueError("no")
        return leyden.Result({"instance": self.number, "calls": self.calls}, 1.0)

    def healthy(self) -> bool:
        return not self.ill

    def close(self) -> None:
        with self.log.open("a") as file:
            file.write(f"closed {self.number}\n")


class KeptAsync:
    """The same on an event loop."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, task: dict[str, Any]) -> Any:
        self.loop, self.log = asyncio.get_running_loop(), Path(task["log"])
        self.calls += 1
        await asyncio.sleep(0)
        return leyden.Result(self.calls, 1.0)

    async def aclose(self) -> None:
        same = asyncio.get_running_loop() is self.loop
        self.log.write_text(f"closed {same}")


class Unmakeable:
    """Its set-up fails."""

    def __init__(self) -> None:
        raise OSError("no emulator here")

    def __call__(self, task: Any) -> float:
        return 1.0


class Wants:
    """Cannot be made without arguments."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, task: Any) -> float:
        return 1.0


class Mute:
    """Cannot be called."""
