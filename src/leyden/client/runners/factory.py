"""Runners, which execute attempts for a worker, and how those of a lease loop are started.

A runner is a host process with a Python agent, a host process for commands, or an HTTP endpoint.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from leyden.api.client import RetryingRemote
from leyden.api.wire import MAX_KEY_TTL_S, KeySpec, Lease, NewKey
from leyden.client.host_protocol import CodeReturned, HostSetup, StepReward, StopReply
from leyden.client.runners.host_process import AGENT_HOST, COMMAND_HOST, HostProcess
from leyden.client.runners.http_endpoint import HttpEndpoint
from leyden.user_code.loading import AgentKind

_COMMAND_STOP_TIMEOUT_S = 10.0
"""A command that is stopped has two seconds to end by itself before it is killed; the rest is for a busy machine."""


class Runner(Protocol):
    """Runs attempts until it is closed or dies. Attempts that it still runs then are lost."""

    pool: str | None
    """The pool in which its attempts are leased; None if each attempt uses its own key."""
    stop_timeout_s: float
    """How long the code of a stopped attempt may take to return."""
    services: tuple[str, ...]
    """Services whose addresses its attempts need."""
    max_concurrency: int | None
    """Attempts that it can run at the same time with the services that it creates itself; None: no limit."""

    def start_attempt(self, lease: Lease) -> None:
        """Start an attempt."""

    async def stop(self, attempt: str) -> StopReply | None:
        """Stop an attempt as far as possible and return its output so far; `CodeReturned` follows as an event.

        None: the runner does not respond.
        """

    async def flush_spans(self, attempt: str) -> None:
        """Wait until the server has the spans of an attempt, but not for long. Called if `has_spans` says so."""

    async def listen(self, on_event: Callable[[CodeReturned | StepReward], None]) -> None:
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


class RunnerFactory:
    """Starts runners for one kind of agent.

    Runners of a Python agent share a pool, whose key is valid for the lease loop's attempts only. A runner for a single
    attempt has that attempt's key.
    """

    def __init__(self, kind: AgentKind, setup: HostSetup, client: RetryingRemote, run: str | None) -> None:
        self._kind, self._setup, self._client, self._run = kind, setup, client, run
        self._pool: NewKey | None = None

    async def start(self, alone: Lease | None, one_at_a_time: bool) -> Runner:
        """Start a runner; `alone` is the only attempt that it will run. A Python agent can run `one_at_a_time`."""
        match self._kind:
            case AgentKind.COMMAND:
                return await HostProcess.start(
                    COMMAND_HOST, self._setup, stop_timeout_s=_COMMAND_STOP_TIMEOUT_S, keep_output=alone is not None
                )
            case AgentKind.ENDPOINT:
                return HttpEndpoint(self._setup)
            case AgentKind.PYTHON if alone is not None:
                setup = replace(self._setup, key=alone.key, concurrency=1)
                return await HostProcess.start(AGENT_HOST, setup, keep_output=True)
            case AgentKind.PYTHON:
                pool = await self._pool_key()
                setup = replace(self._setup, key=pool.key)
                if one_at_a_time:
                    setup = replace(setup, concurrency=1)
                return await HostProcess.start(AGENT_HOST, setup, pool=pool.pool)

    async def _pool_key(self) -> NewKey:
        """Return the key of the pool, which expires together with the worker's own."""
        if self._pool is None:
            spec = KeySpec("pool", self._run, MAX_KEY_TTL_S)
            self._pool = await self._client.create_key(spec)
        return self._pool
