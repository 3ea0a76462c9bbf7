"""How the runners of a lane are started, one after another."""

from msgspec.structs import replace

from leyden.client.agent_reference import AgentKind
from leyden.client.host_protocol import HostSetup
from leyden.client.retrying_client import RetryingClient
from leyden.client.runners.base import Runner
from leyden.client.runners.host_process import HostProcess
from leyden.client.runners.http_endpoint import HttpEndpoint
from leyden.wire import KeySpec, Lease, NewKey

_COMMAND_ENDS_S = 10.0
"""A command that is stopped has a while to end by itself, and is killed then."""


class RunnerFactory:
    """Starts what runs a lane's attempts. A lane has a pool of its own: its key speaks for the lane's attempts only.

    What runs a single attempt has that attempt's key.
    """

    def __init__(self, kind: AgentKind, setup: HostSetup, contact: RetryingClient, run: str | None) -> None:
        self._kind, self._setup, self._contact, self._run = kind, setup, contact, run
        self._pool: NewKey | None = None

    async def begin(self, alone: Lease | None) -> Runner:
        """Start a runner; `alone` names the only attempt that it is for."""
        match self._kind:
            case AgentKind.COMMAND:
                return await HostProcess.start(
                    "leyden.client.runners.command_host",
                    self._setup,
                    return_s=_COMMAND_ENDS_S,
                    keep_output=alone is not None,
                )
            case AgentKind.ENDPOINT:
                return HttpEndpoint(self._setup)
            case AgentKind.PYTHON if alone is not None:
                setup = replace(self._setup, key=alone.key, places=1)
                return await HostProcess.start("leyden.client.host.main", setup, keep_output=True)
            case AgentKind.PYTHON:
                pool = await self._own_pool()
                return await HostProcess.start(
                    "leyden.client.host.main", replace(self._setup, key=pool.key), pool=pool.pool
                )

    async def _own_pool(self) -> NewKey:
        if self._pool is None:
            self._pool = await self._contact.insist(lambda: self._contact.remote.make_key(KeySpec("pool", self._run)))
        return self._pool
