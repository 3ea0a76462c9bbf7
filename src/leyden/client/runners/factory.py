"""Starts the runners of a lease loop, one after another."""

from msgspec.structs import replace

from leyden.api.retrying import RetryingRemote
from leyden.api.wire import MAX_KEY_TTL_S, KeySpec, Lease, NewKey
from leyden.client.host_protocol import HostSetup
from leyden.client.runners.base import Runner
from leyden.client.runners.host_process import AGENT_HOST, COMMAND_HOST, HostProcess
from leyden.client.runners.http_endpoint import HttpEndpoint
from leyden.user_code.agent_reference import AgentKind

_COMMAND_STOP_TIMEOUT_S = 10.0
"""A command that is stopped has two seconds to end by itself before it is killed; the rest is for a busy machine."""


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
                    COMMAND_HOST,
                    self._setup,
                    stop_timeout_s=_COMMAND_STOP_TIMEOUT_S,
                    keep_output=alone is not None,
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
