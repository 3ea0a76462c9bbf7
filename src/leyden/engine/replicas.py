"""Several engines behind one, as the training process uses them: published to at once, each restarted by itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NoReturn, Protocol

from leyden.background import running, start_background
from leyden.engine.protocol import (
    EngineBackend,
    EngineError,
    ModelWeights,
    Publication,
    ReplicasAddress,
    SocketAddress,
    VllmAddress,
)
from leyden.engine.remote import SeparateEngine

_TRANSFER_LIMIT_S, _BYTES_PER_S = 60.0, 1e8
"""A publication may take this long, and more at this rate: CPUs compute checksums of it, and replicas elsewhere share a
network."""
_POLL_S = 0.5


class ReplicaPart(EngineBackend, Protocol):
    """One of the engines."""

    @property
    def address(self) -> SocketAddress | VllmAddress:
        """How a server process reaches it."""

    @property
    def is_down(self) -> bool:
        """Whether it is being restarted; it then gets the latest weights."""

    async def start(self) -> None:
        """Start it with the trainer's weights."""

    async def stop(self) -> None:
        """End it."""


class ReplicaBackend(SeparateEngine):
    """Engines that serve the same weights."""

    def __init__(self, replicas: Sequence[ReplicaPart], weight_bytes: int = 0) -> None:
        self._replicas = replicas
        self._limit_s = _TRANSFER_LIMIT_S + weight_bytes / _BYTES_PER_S

    @property
    def address(self) -> ReplicasAddress:
        """How a server process reaches all of them."""
        return ReplicasAddress(tuple(replica.address for replica in self._replicas))

    async def start(self) -> None:
        """Start all at once. Raises `EngineError` with the first reason if that fails."""
        started = await asyncio.gather(*(replica.start() for replica in self._replicas), return_exceptions=True)
        for result in started:
            if result is not None:
                raise result

    async def stop(self) -> None:
        """End all."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas), return_exceptions=True)

    async def wait_failed(self) -> NoReturn:
        """Wait until one of them has failed for good, and raise the reason."""
        async with running(*(replica.wait_failed() for replica in self._replicas)) as failures:
            done, _ = await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Let the trainer write its parameters."""
        async with AsyncExitStack() as changing:
            for replica in self._replicas:
                await changing.enter_async_context(replica.changing_weights(version))
            yield

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Send weights to all at once. One that is being restarted gets them then; the others do not wait for it.

        Raises `EngineError` if one does not have them in time, or has others.
        """
        started = time.monotonic()
        tasks = [
            start_background(replica.publish(weights, version), f"publishing to replica {number}")
            for number, replica in enumerate(self._replicas)
        ]
        try:
            while waited := self._still_waited_for(tasks):
                left_s = started + self._limit_s - time.monotonic()
                if left_s <= 0:
                    is_down = self._replicas[waited[0]].is_down
                    state = ": it is being started again, and its log says why" if is_down else ""
                    raise EngineError(
                        f"replica {waited[0]} of the engine did not take the weights of version {version} "
                        f"within {self._limit_s:.0f} s{state}"
                    )
                await asyncio.wait([tasks[number] for number in waited], timeout=min(_POLL_S, left_s))
            sent = [task.result().transferred_bytes for task in tasks if task.done()]
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return Publication(time.monotonic() - started, sum(sent))

    def _still_waited_for(self, tasks: Sequence["asyncio.Task[Publication]"]) -> list[int]:
        """Return the replicas that have not the weights yet and are not being restarted; all if none has them."""
        unfinished = [number for number, task in enumerate(tasks) if not task.done()]
        alive = [number for number in unfinished if not self._replicas[number].is_down]
        return alive if len(unfinished) < len(tasks) else unfinished
