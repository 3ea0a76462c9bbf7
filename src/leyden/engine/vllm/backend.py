"""Keeps a vLLM server at the weights that a trainer has published last.

All weights are sent and their checksums compared at the start, after every update and after every restart.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from leyden.engine.protocol import ModelWeights, Publication, VllmAddress
from leyden.engine.vllm.launch import VllmOptions
from leyden.engine.vllm.serving import ServedVllm, ServingOptions
from leyden.engine.weight_files import WeightFiles, Weights


class VllmBackend(ServedVllm):
    """A vLLM server with all weights of one policy."""

    def __init__(
        self,
        options: VllmOptions,
        log: Path,
        weights: Weights,
        serving: ServingOptions,
        files: WeightFiles,
        version: int = 0,
    ) -> None:
        """`weights` are those of `version`, by their Hugging Face names."""
        super().__init__(options, log, serving, files)
        self._weights, self._version = weights, version
        self._published = asyncio.Event()
        """Whether the trainer's parameters are those that were published last."""
        self._published.set()
        self._restart_waits = False
        """Whether a restarted vLLM waits for the publication."""

    @property
    def address(self) -> VllmAddress:
        """How a server process reaches it, with the version of the weights that it has or gets next."""
        return replace(self._address, version=self._version)

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Let the trainer write its parameters. A vLLM that is restarted from now on waits for their publication."""
        async with self._lock:
            self._published.clear()
            yield

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Send weights to vLLM. The server must hold its calls meanwhile."""
        started = time.monotonic()
        async with self._lock:
            self._version, self._weights = version, weights.tensors
            delivered_by_restart = self._restart_waits
            self._published.set()
        if delivered_by_restart and await self._server.recovered():
            sent = 0
        else:
            sent = await self._or_recover(self._deliver)
        return Publication(time.monotonic() - started, sent)

    async def _send(self) -> int:
        return await self._publisher.send(self._weights, self._version)

    async def _restarted(self) -> None:
        self._restart_waits = True
        await self._published.wait()  # vLLM is paused until it has weights
        self._restart_waits = False
        await super()._restarted()
