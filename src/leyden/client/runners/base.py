"""The interface of runners: host processes with Python agents, host processes for commands, and HTTP endpoints."""

from collections.abc import Callable, Mapping
from typing import Protocol

from leyden.api.wire import Lease
from leyden.client.host_protocol import AttemptEnd, StepReward, StopReply


class Runner(Protocol):
    """Runs attempts until it is closed or dies. Attempts that it still runs then are lost."""

    pool: str | None
    """The pool in which its attempts are leased; None where each attempt uses its own key."""
    stop_timeout_s: float
    """How long the code of a stopped attempt may take to return."""
    services: tuple[str, ...]
    """Services whose addresses its attempts need."""
    max_concurrency: int | None
    """Attempts that it can run at the same time with the services that it creates itself; None: no limit."""

    def start_attempt(self, lease: Lease, addresses: Mapping[str, str]) -> None:
        """Start an attempt, with the addresses of the services that it has acquired."""

    async def stop(self, attempt: str) -> StopReply | None:
        """Stop an attempt as far as possible and return its output so far; `AttemptEnd` follows as an event.

        None: the runner does not respond.
        """

    async def flush_spans(self, attempt: str) -> None:
        """Wait until the server has the spans of an attempt, but not for long. Called if `has_spans` says so."""

    async def listen(self, on_event: Callable[[AttemptEnd | StepReward], None]) -> None:
        """Call `on_event` for every step reward and every attempt whose code has returned, until the runner is gone."""

    async def is_responsive(self, timeout_s: float) -> bool:
        """Whether it could run something new: code that blocks its event loop prevents that."""

    async def find_blocker(self) -> str | None:
        """Return the attempt whose code blocks its event loop, if that can be determined."""

    async def exit_reason(self) -> str:
        """Return how the runner ended, for a message."""

    def output(self) -> str:
        """Return what it printed. Only a runner with a single attempt keeps it."""

    async def close(self, *, kill: bool = False) -> None:
        """End the runner and everything it runs; with `kill` without giving it time to end by itself."""
