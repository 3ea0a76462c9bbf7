"""What a lane has its attempts run by: a process with Python agents in it, one with commands, or an endpoint."""

from collections.abc import Callable, Mapping
from typing import Protocol

from leyden.client.host_protocol import AttemptEnd, HostStopping, StepReward
from leyden.wire import Lease


class Runner(Protocol):
    """Runs attempts until it is gone; the lane then loses what it ran, and starts another."""

    pool: str | None
    """Under which its attempts are leased; None where each uses the key that came with its lease."""
    return_s: float
    """How long the code of an attempt that was stopped may take to return."""

    services: tuple[str, ...]
    """Whose addresses its attempts are to be lent."""
    at_once: int | None
    """How many attempts it can run at once for want of services of its own; None: as many as it has places."""

    def run(self, lease: Lease, lent: Mapping[str, str]) -> None:
        """Begin an attempt, which is lent services at these addresses."""

    async def stop(self, attempt: str) -> HostStopping | None:
        """Stop an attempt, as far as it can be stopped, and say what it has printed. That it has ended follows.

        None: there was no answer at all.
        """

    async def listen(self, hear: Callable[[AttemptEnd | StepReward], None]) -> None:
        """Hear of every reward, and of every attempt whose code has returned, until the runner is gone."""

    async def answers(self, within_s: float) -> bool:
        """Whether it could run something new by now: code that blocks the event loop keeps it from that."""

    async def blocker(self) -> str | None:
        """The attempt whose code keeps it from that, where it can be told."""

    async def death(self) -> str:
        """How it went, in words."""

    def output(self) -> str:
        """What it printed, where that is kept: of a runner with a single attempt."""

    async def close(self, *, at_once: bool = False) -> None:
        """End it and all that it runs; `at_once` where there is no use in asking it to."""
