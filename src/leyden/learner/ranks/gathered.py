"""The weights of a policy that is sharded over ranks: gathered one at a time, for files or for broadcasts by rank 0."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from leyden.background import start_background, wait_set
from leyden.engine.broadcast import Dtypes, Sent
from leyden.engine.protocol import EngineError, LoraWeights
from leyden.learner.ranks.processes import RankProcesses

T = TypeVar("T")
_TOGETHER_S = 2.0
"""How long engines wait for one that had the weights before: it may be gone, or about to ask for them as well."""


class _Waiting(NamedTuple):
    """An engine that waits for a broadcast."""

    dtypes: Dtypes
    sent: asyncio.Future[Sent]


class GatheredTensors:
    """The tensors. Iterate over them on another thread than that of the event loop."""

    def __init__(self, ranks: RankProcesses, loop: asyncio.AbstractEventLoop, merged: bool) -> None:
        """`merged` says whether a LoRA adapter is part of them."""
        self._ranks, self._loop, self._merged = ranks, loop, merged
        self._joined: set[str] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._all_wait = asyncio.Event()
        self._next: asyncio.Task[None] | None = None
        """The next broadcast, until it begins."""
        self._one_at_a_time = asyncio.Lock()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in _wait(self._loop, self.shapes()):
            yield name, _wait(self._loop, self._call("weight", name, self._merged))

    async def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor."""
        found: dict[str, list[int]] = await self._call("weight_shapes")
        return found

    async def listen(self, engine: str) -> tuple[str, int]:
        """Return the address of rank 0 at which the workers of an engine can join it."""
        address: tuple[str, int] = await self._call("listen", engine)
        return address

    async def join(self, engine: str, size: int) -> None:
        """Have rank 0 make a group with the workers of an engine, which takes longer the first time."""
        error: EngineError | None = await self._call("join", engine, size, patient=True)
        if error is not None:
            raise error
        self._joined.add(engine)

    async def broadcast(self, engine: str, dtypes: Dtypes) -> Sent:
        """Have rank 0 broadcast each tensor when it is gathered, to all engines that wait for them at once."""
        waiting = self._waiting[engine] = _Waiting(dtypes, self._loop.create_future())
        if self._joined <= self._waiting.keys():
            self._all_wait.set()
        if self._next is None:
            self._next = start_background(self._broadcast(), "a broadcast of weights")
        try:
            return await waiting.sent
        except EngineError:
            self._joined.discard(engine)
            raise
        finally:
            if self._waiting.get(engine) is waiting:
                del self._waiting[engine]

    async def _broadcast(self) -> None:
        await wait_set(self._all_wait, _TOGETHER_S)
        async with self._one_at_a_time:  # all that come while one runs share the next
            taking, self._waiting, self._next = self._waiting, {}, None
            self._all_wait.clear()
            ends = await self._send_to({engine: one.dtypes for engine, one in taking.items()})
        for engine, one in taking.items():
            if one.sent.done():  # nobody waits any more
                continue
            if isinstance(end := ends[engine], Exception):
                one.sent.set_exception(end)
            else:
                one.sent.set_result(end)

    async def _send_to(self, engines: Mapping[str, Dtypes]) -> Mapping[str, Sent | Exception]:
        if not engines:  # all have given up
            return {}
        try:
            ends: Mapping[str, Sent | EngineError] = await self._call("broadcast", engines, self._merged)
            return ends
        except Exception as error:
            return dict.fromkeys(engines, error)

    async def _call(self, method: str, *arguments: Any, patient: bool = False) -> Any:
        """Return what rank 0 returns."""
        return (await self._ranks.call(method, *arguments, patient=patient))[0]


class GatheredWeights:
    """The weights, as engines are sent them."""

    def __init__(self, ranks: RankProcesses, loop: asyncio.AbstractEventLoop) -> None:
        self._ranks, self._loop = ranks, loop
        self._tensors, self._base = (GatheredTensors(ranks, loop, merged) for merged in (True, False))

    def tensors(self) -> GatheredTensors:
        """Return the weights of the model that is served."""
        return self._tensors

    def base(self) -> GatheredTensors:
        """Return the weights without the LoRA adapter."""
        return self._base

    def adapter(self) -> LoraWeights | None:
        """Gather the LoRA adapter, if the policy has one. Call it on another thread than that of the event loop."""
        found: LoraWeights | None = _wait(self._loop, self._ranks.call("adapter"))[0]
        return found


def _wait(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    """Wait on a thread for what the event loop of another does."""
    return asyncio.run_coroutine_threadsafe(call, loop).result()
