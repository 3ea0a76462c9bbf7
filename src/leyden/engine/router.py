"""Several engines that serve the same weights, as one engine.

The requests of a session go to the replica that has its prefix; a new session goes to the least loaded one. If a
replica is lost, its requests continue on another from the tokens that they have, and it gets no more until it answers
again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from msgspec.structs import replace

from leyden.background import start_background, wait_set
from leyden.engine.protocol import RESTART_LIMIT_S, Engine, EngineLost, EngineRequest, TokenChunk

_POLL_S = 0.5
"""Between two questions whether a replica answers again."""
_MAX_LOSSES = 2
"""A request that is lost with more replicas than this fails: it may be what ends them."""


class Replica(Engine, Protocol):
    """An engine that can be asked whether it answers."""

    async def is_ready(self) -> bool:
        """Whether it answers."""


class ReplicaRouter:
    """Routes requests to replicas."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.context_length = min(replica.context_length for replica in replicas)
        self.vocab_size = replicas[0].vocab_size
        self.reports_allowed_mass = all(replica.reports_allowed_mass for replica in replicas)
        self.running = [0] * len(replicas)
        """By replica, the requests that run there."""
        self._homes: dict[str, int] = {}
        """By session, the replica that has its prefix."""
        self._sessions = Counter[int]()
        self._lost: dict[int, asyncio.Task[None]] = {}
        """Replicas that do not answer, each with the task that waits until it does."""
        self._answers = asyncio.Event()
        """Whether at least one replica answers."""
        self._answers.set()

    @property
    def loads(self) -> tuple[int | None, ...]:
        """By replica, the requests that run there; None at one that does not answer."""
        return tuple(None if index in self._lost else running for index, running in enumerate(self.running))

    async def close(self) -> None:
        """Wait for lost replicas no longer."""
        waiting = list(self._lost.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion. Tokens of one that moves are sampled by several replicas, each with its version."""
        sampled: list[int] = []
        losses = 0
        while True:
            async for chunk in self._wait_for_any():
                yield chunk
            index = self._choose(request.session)
            self.running[index] += 1
            try:
                async with aclosing(self._replicas[index].generate(request.after(tuple(sampled)))) as chunks:
                    async for chunk in chunks:
                        if chunk.restarting:  # it has not begun: another can
                            break
                        yield chunk
                        sampled += chunk.ids
                        if chunk.prompt_logprobs:
                            request = replace(request, prompt_logprobs=False)
                        if chunk.finish is not None:
                            return
                self._lose(index)
            except EngineLost:
                self._lose(index)
                losses += 1
                if losses > _MAX_LOSSES:
                    raise
            finally:
                self.running[index] -= 1

    def end_session(self, session: str) -> None:
        """Free what the session's replica keeps for it."""
        if (home := self._homes.pop(session, None)) is not None:
            self._sessions[home] -= 1
            self._replicas[home].end_session(session)

    def hold(self) -> None:
        """Start no new request on any replica."""
        for replica in self._replicas:
            replica.hold()

    def resume(self, version: int) -> None:
        """Start requests again; a replica that is lost gets these weights before it answers."""
        for replica in self._replicas:
            replica.resume(version)

    def _choose(self, session: str) -> int:
        """Return the session's replica; if it has none that answers, the least loaded becomes it."""
        home = self._homes.get(session)
        if home is None or home in self._lost:
            self.end_session(session)
            answering = [index for index in range(len(self._replicas)) if index not in self._lost]
            home = min(answering, key=lambda index: (self.running[index], self._sessions[index]))
            self._homes[session] = home
            self._sessions[home] += 1
        return home

    def _lose(self, index: int) -> None:
        """Send a replica nothing until it answers again."""
        if index not in self._lost:
            self._lost[index] = start_background(self._wait_ready(index), "waiting for a replica of the engine")
        if len(self._lost) == len(self._replicas):
            self._answers.clear()

    async def _wait_ready(self, index: int) -> None:
        while not await self._replicas[index].is_ready():  # noqa: ASYNC110 - it does not announce that
            await asyncio.sleep(_POLL_S)
        del self._lost[index]
        self._answers.set()

    async def _wait_for_any(self) -> AsyncGenerator[TokenChunk, None]:
        """Wait until a replica answers; say that the request waits."""
        deadline = time.monotonic() + RESTART_LIMIT_S
        while not self._answers.is_set():
            yield TokenChunk((), (), 0, restarting=True)
            if not await wait_set(self._answers, deadline - time.monotonic()):
                raise EngineLost(f"no replica of the engine answered for {RESTART_LIMIT_S:.0f} s")
