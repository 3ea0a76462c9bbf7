"""What a lane has its attempts run by: a process with Python agents in it, one with commands, or an endpoint."""

from collections.abc import Callable
from typing import Protocol

from leyden.client.messages import Ended, Rewarded
from leyden.wire import Lease


class Runner(Protocol):
    """Runs attempts until it is gone; the lane then loses what it ran, and starts another."""

    pool: str | None
    """Under which its attempts are leased; None where each uses the key that came with its lease."""

    def run(self, lease: Lease) -> None:
        """Begin an attempt."""

    async def stop(self, attempt: str) -> str:
        """Stop an attempt, as far as it can be stopped, and give what it has printed. That it has ended follows."""

    async def listen(self, hear: Callable[[Ended | Rewarded], None]) -> None:
        """Hear of every reward, and of every attempt whose code has returned, until the runner is gone."""

    async def death(self) -> str:
        """How it went, in words."""

    async def close(self) -> None:
        """End it and all that it runs."""
