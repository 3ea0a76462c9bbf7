"""Replicas as one engine: who gets a request, and what becomes of it if its replica is lost."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
from modelserving import eventually
from msgspec.structs import replace
from scripted_engine import ScriptedEngine

from leyden.engine import router as router_module
from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, TokenChunk
from leyden.engine.router import ReplicaRouter
from leyden.records import Sampling

TOKENS = 12


class ScriptedReplica(ScriptedEngine):
    """Completes a prompt by counting on from its last token; can be killed, and started again."""

    def __init__(self) -> None:
        super().__init__(self._count, chunk_tokens=3)
        self.alive, self.waits = True, False
        self.dies_after: int | None = None
        """So many chunks of a request later it dies."""
        self.gate = asyncio.Event()
        self.gate.set()

    def _count(self, request: EngineRequest) -> Sequence[int]:
        return [request.prompt_ids[-1] + 1 + at for at in range(request.max_tokens)]

    async def is_ready(self) -> bool:
        return self.alive

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        if not self.alive and self.waits:
            yield TokenChunk((), (), 0, restarting=True)
        if not self.alive:
            raise EngineLost("it is gone")
        sent = 0
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                await self.gate.wait()
                if sent == self.dies_after:
                    self.alive, self.dies_after = False, None
                    raise EngineLost("it died")
                sent += 1
                yield chunk


def request(session: str, **more: object) -> EngineRequest:
    return replace(EngineRequest((5, 100), Sampling(seed=3), (), TOKENS, session), **more)


async def collect(router: ReplicaRouter, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in router.generate(request)]


def ids(chunks: Sequence[TokenChunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


@asynccontextmanager
async def routed(count: int = 2) -> AsyncIterator[tuple[ReplicaRouter, list[ScriptedReplica]]]:
    replicas = [ScriptedReplica() for _ in range(count)]
    router = ReplicaRouter(replicas)
    try:
        yield router, replicas
    finally:
        await router.close()
    assert router.running == [0] * count


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_POLL_S", 0.001)


async def test_a_session_stays_on_its_replica_and_new_ones_go_to_the_least_loaded() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.gate.clear()
        running = [asyncio.create_task(collect(router, request(f"s{number}"))) for number in range(6)]
        await eventually(lambda: router.running == [3, 3])
        for replica in replicas:
            replica.gate.set()
        await asyncio.gather(*running)
        replicas[0].gate.clear()
        busy = asyncio.create_task(collect(router, request("s0")))
        await eventually(lambda: router.running[0] == 1)
        await collect(router, request("new"))
        assert replicas[1].requests[-1].session == "new"
        waiting = asyncio.create_task(collect(router, request("s2")))  # its prefix is on the busy one
        await eventually(lambda: router.running[0] == 2)
        replicas[0].gate.set()
        await asyncio.gather(busy, waiting)
        homes = [{one.session for one in replica.requests} for replica in replicas]
        assert not homes[0] & homes[1]


async def test_sessions_that_run_nothing_count_too_until_they_end() -> None:
    async with routed() as (router, replicas):
        for number in range(4):
            await collect(router, request(f"s{number}"))
        assert [len(replica.requests) for replica in replicas] == [2, 2]
        for session in ("s1", "s3", "s3", "unknown"):
            router.end_session(session)
        assert [replica.ended_sessions for replica in replicas] == [[], ["s1", "s3"]]
        for number in range(4, 6):
            await collect(router, request(f"s{number}"))
        assert len(replicas[1].requests) == 4


async def test_a_request_continues_on_another_replica_from_the_tokens_that_it_has() -> None:
    async with routed() as (router, replicas):
        replicas[0].dies_after = 2
        chunks = await collect(router, request("s", prompt_logprobs=True))
        assert ids(chunks) == list(range(101, 101 + TOKENS))
        assert chunks[-1].finish == "length"
        (rest,) = replicas[1].requests
        assert rest.prompt_ids == (5, 100, 101, 102, 103) and rest.max_tokens == TOKENS - 3
        assert not rest.prompt_logprobs  # they were sent
        assert rest.sampling.seed not in (None, 3)  # other noise than at the beginning


async def test_a_request_whose_prompt_was_answered_continues_without_it() -> None:
    async with routed() as (router, replicas):
        replicas[0].dies_after = 1
        chunks = await collect(router, request("s", prompt_logprobs=True))
        assert [bool(chunk.prompt_logprobs) for chunk in chunks].count(True) == 1
        assert ids(chunks) == list(range(101, 101 + TOKENS))
        assert not replicas[1].requests[0].prompt_logprobs


async def test_a_lost_replica_gets_requests_again_when_it_answers() -> None:
    async with routed() as (router, replicas):
        replicas[0].alive = False
        for number in range(3):
            assert len(ids(await collect(router, request(f"s{number}")))) == TOKENS
        assert [len(replica.requests) for replica in replicas] == [0, 3]
        assert router.loads == (None, 0)
        replicas[0].alive = True
        await eventually(lambda: not router._lost)
        await collect(router, request("new"))
        assert [one.session for one in replicas[0].requests] == ["new"]
        await collect(router, request("s1"))  # it stays where it moved to
        assert replicas[1].requests[-1].session == "s1"


async def test_a_request_does_not_wait_for_a_replica_that_is_being_restarted() -> None:
    async with routed() as (router, replicas):
        replicas[0].alive, replicas[0].waits = False, True
        chunks = await collect(router, request("s"))
        assert not any(chunk.restarting for chunk in chunks) and len(ids(chunks)) == TOKENS


async def test_without_any_replica_requests_say_that_they_wait_and_go_on() -> None:
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.alive = False
        waiting = asyncio.create_task(collect(router, request("s")))
        await eventually(lambda: len(router._lost) == 2)
        replicas[1].alive = True
        chunks = await waiting
        assert chunks[0].restarting and not chunks[-1].restarting
        assert len(ids(chunks)) == TOKENS


async def test_a_request_fails_if_no_replica_answers_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "RESTART_LIMIT_S", 0.01)
    async with routed() as (router, replicas):
        for replica in replicas:
            replica.alive = False
        with pytest.raises(EngineLost, match="no replica of the engine answered"):
            await collect(router, request("s"))


async def test_a_request_that_ends_every_replica_fails() -> None:
    async with routed(4) as (router, replicas):
        for replica in replicas:
            replica.dies_after = 0
        with pytest.raises(EngineLost, match="it died"):
            await collect(router, request("s"))
        assert sum(not replica.alive for replica in replicas) == 3


async def test_a_penalised_request_continues_on_another_replica_with_its_tokens() -> None:
    async with routed() as (router, replicas):
        penalised = request("s", sampling=Sampling(presence_penalty=0.5))
        replicas[0].dies_after = 1
        assert len(ids(await collect(router, penalised))) == TOKENS
        (continued,) = replicas[1].requests
        assert continued.sampled_ids == continued.prompt_ids[2:] and continued.sampled > 0


async def test_an_error_that_is_no_loss_is_the_requests_own() -> None:
    async with routed() as (router, replicas):
        replicas[0].script = lambda request: [-1]
        with pytest.raises(EngineError, match="the script makes the engine fail here"):
            await collect(router, request("s"))
        assert not router._lost and not replicas[1].requests


async def test_closing_a_request_cancels_it_on_its_replica() -> None:
    async with routed() as (router, replicas):
        async with aclosing(router.generate(request("s"))) as chunks:
            await anext(chunks)
        assert replicas[0].cancelled == 1


async def test_every_replica_learns_of_new_weights() -> None:
    async with routed() as (router, replicas):
        router.hold()
        router.resume(4)
        chunks = [*await collect(router, request("a")), *await collect(router, request("b"))]
        assert {chunk.version for chunk in chunks} == {4} and all(replica.requests for replica in replicas)
