"""Weights go to all replicas at once; one that is down, hangs or has others does not go unnoticed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from modelserving import eventually
from small_engines import NoWeights

from leyden.engine import replicas as replicas_module
from leyden.engine.protocol import EngineError, ModelWeights, Publication, SocketAddress
from leyden.engine.replicas import ReplicaBackend


class ScriptedPart:
    """A replica that takes weights when its gate is open."""

    shares_parameters = sleeps_while_training = False

    def __init__(self, number: int) -> None:
        self.address = SocketAddress(100, 50, 8 + number, f"/{number}.sock")
        self.is_down, self.running, self.changing = False, False, 0
        self.gate, self.failed = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.error: EngineError | None = None
        self.versions: list[int] = []

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async def sleep(self) -> None: ...

    async def wait_failed(self) -> NoReturn:
        await self.failed.wait()
        raise EngineError("it keeps dying")

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        self.changing += 1
        yield
        self.changing -= 1

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.versions.append(version)
        return Publication(0.0, 10)


@pytest.fixture
def parts() -> list[ScriptedPart]:
    return [ScriptedPart(number) for number in range(3)]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_POLL_S", 0.001)


async def test_all_are_started_reached_and_published_to_at_once(parts: list[ScriptedPart]) -> None:
    backend = ReplicaBackend(parts)
    await backend.start()
    assert all(part.running for part in parts)
    assert backend.address.replicas == tuple(part.address for part in parts) and backend.address.concurrency == 27
    parts[0].gate.clear()
    publishing = asyncio.create_task(backend.publish(NoWeights(), 4))
    await eventually(lambda: bool(parts[1].versions and parts[2].versions))  # the first one does not delay them
    assert not publishing.done()
    parts[0].gate.set()
    assert (await publishing).transferred_bytes == 30
    async with backend.changing_weights(5):
        assert [part.changing for part in parts] == [1, 1, 1]
    await backend.stop()
    assert not any(part.running for part in parts)


async def test_a_replica_that_is_being_restarted_is_not_waited_for(parts: list[ScriptedPart]) -> None:
    backend = ReplicaBackend(parts)
    parts[1].gate.clear()
    publishing = asyncio.create_task(backend.publish(NoWeights(), 4))
    await eventually(lambda: bool(parts[0].versions and parts[2].versions))
    assert not publishing.done()
    parts[1].is_down = True
    assert (await publishing).transferred_bytes == 20
    parts[1].gate.set()  # it is up again, and has the weights
    await eventually(lambda: bool(parts[1].versions))


async def test_without_any_that_is_up_the_first_is_waited_for(parts: list[ScriptedPart]) -> None:
    backend = ReplicaBackend(parts)
    for part in parts:
        part.gate.clear()
        part.is_down = True
    publishing = asyncio.create_task(backend.publish(NoWeights(), 4))
    await asyncio.sleep(0.01)
    assert not publishing.done()
    parts[2].gate.set()
    assert (await publishing).transferred_bytes == 10


async def test_a_transfer_that_hangs_is_an_error_that_names_the_replica(
    parts: list[ScriptedPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ReplicaBackend(parts)._limit_s == 60
    assert ReplicaBackend(parts, weight_bytes=66 * 10**9)._limit_s == 720  # of 32 billion parameters
    monkeypatch.setattr(replicas_module, "_TRANSFER_LIMIT_S", 0.02)
    parts[2].gate.clear()
    with pytest.raises(EngineError, match=r"replica 2 of the engine did not take the weights of version 4 within 0 s$"):
        await ReplicaBackend(parts).publish(NoWeights(), 4)
    parts[2].is_down = True
    with pytest.raises(EngineError, match="within 0 s: it is being started again"):
        await ReplicaBackend(parts[2:]).publish(NoWeights(), 5)


async def test_a_replica_that_has_other_weights_fails_the_publication(parts: list[ScriptedPart]) -> None:
    parts[1].error = EngineError("after publishing, 1 of 3 tensors in the engine differ")
    with pytest.raises(EngineError, match="tensors in the engine differ"):
        await ReplicaBackend(parts).publish(NoWeights(), 4)


async def test_the_run_ends_if_one_cannot_be_started(parts: list[ScriptedPart]) -> None:
    backend = ReplicaBackend(parts)
    failing = asyncio.create_task(backend.wait_failed())
    parts[1].failed.set()
    with pytest.raises(EngineError, match="it keeps dying"):
        await failing
    parts[2].error = EngineError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        await backend.start()
