"""Serves the LoRA adapters of one or more policies beside one base, in one vLLM server.

A request names its adapter by policy and version, so one is published while the requests of other policies go on: only
those of its own policy must be held. Published adapters are copied, and a restarted vLLM gets all of them again.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from leyden.engine.protocol import LoraWeights, ModelWeights, Publication, VllmAddress
from leyden.engine.remote import SeparateEngine
from leyden.engine.vllm.launch import VllmOptions
from leyden.engine.vllm.serving import ServedVllm, ServingOptions
from leyden.engine.weight_files import WeightFiles, Weights

Adapter = Callable[[], LoraWeights | None]


class PublishedAdapter(Struct, frozen=True):
    """The adapter that a policy is served with."""

    weights: LoraWeights
    version: int


class AdapterServer(ServedVllm):
    """A vLLM server with an adapter for each of some policies."""

    _keeps_weights = True

    def __init__(
        self,
        options: VllmOptions,
        log: Path,
        base: Weights,
        adapters: Mapping[str, tuple[Adapter, int]],
        serving: ServingOptions,
        files: WeightFiles,
    ) -> None:
        """`base` are the weights of the model's folder. `adapters` are the first ones, by policy, with versions."""
        super().__init__(options, log, serving, files)
        self._base, self._first = base, adapters
        self._adapters: dict[str, PublishedAdapter] = {}
        self._starting: asyncio.Task[None] | None = None

    def address_of(self, policy: str) -> VllmAddress:
        """Return how a server process reaches a policy, with the version that it has or gets next."""
        known = self._adapters.get(policy)
        version = self._first[policy][1] if known is None else known.version
        return replace(self._address, version=version, adapter=policy)

    async def start(self) -> None:
        """Start vLLM with all adapters, once: every policy asks for it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await self._starting

    async def _start(self) -> None:
        for policy, (adapter, version) in self._first.items():
            self._adapters[policy] = PublishedAdapter(await asyncio.to_thread(_copy, adapter), version)
        await super().start()

    async def publish(self, policy: str, adapter: Adapter, version: int) -> Publication:
        """Send an adapter to vLLM. The server must hold the policy's calls meanwhile.

        With several policies vLLM has room for one adapter more, so that none of those in use is moved.
        """
        started = time.monotonic()
        copy = await asyncio.to_thread(_copy, adapter)
        async with self._lock:
            self._adapters[policy] = PublishedAdapter(copy, version)
        send = self._deliver if len(self._adapters) == 1 else partial(self._load_beside_others, policy)
        return Publication(time.monotonic() - started, await self._or_recover(send))

    async def _load_beside_others(self, policy: str) -> int:
        async with self._lock:
            return await self._load(policy)

    async def _send(self) -> int:
        return sum([await self._load(policy) for policy in self._adapters])

    async def _load(self, policy: str) -> int:
        known = self._adapters[policy]
        return await self._publisher.send_adapter(policy, known.weights, self._base, known.version)


class AdapterBackend(SeparateEngine):
    """One policy of an `AdapterServer`, as an engine."""

    def __init__(self, server: AdapterServer, policy: str) -> None:
        self._server, self._policy = server, policy
        self.start, self.stop, self.wait_failed = server.start, server.stop, server.wait_failed
        """Those of vLLM, which starts once and stops for all policies."""
        self.sleeps_while_training = server.sleeps_while_training
        """Whether the trainer must call `sleep` before it computes."""

    @property
    def address(self) -> VllmAddress:
        """How a server process reaches the policy."""
        return self._server.address_of(self._policy)

    @property
    def is_down(self) -> bool:
        """Whether vLLM is being restarted."""
        return self._server.is_down

    async def sleep(self) -> None:
        """Free vLLM's memory until the next publication."""
        await self._server.sleep()

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Serve an adapter. The server must hold the policy's calls meanwhile."""
        return await self._server.publish(self._policy, weights.adapter, version)


def _copy(adapter: Adapter) -> LoraWeights:
    """Copy an adapter to the host: the trainer goes on with its own."""
    found = adapter()
    assert found is not None
    return LoraWeights(found.rank, {name: each.detach().to("cpu", copy=True) for name, each in found.tensors.items()})
