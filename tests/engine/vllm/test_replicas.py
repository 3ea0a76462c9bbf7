"""Two real vLLM servers on the CPU as one engine: both have what is published, and one is enough while one is dead."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import closing

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace
from spark_vllm import OPTIONS, changed, close, collect, ids, logprobs, needs_vllm, prompt, request, scored, versions
from test_backend import ModelUpdate

from leyden.engine.replicas import ReplicaBackend
from leyden.engine.router import ReplicaRouter
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.process import VllmProcess
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles
from leyden.process import guardian

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[VllmBackend]]:
    folder = tmp_path_factory.mktemp("replicas")
    with closing(WeightFiles()) as files:
        parts = [
            VllmBackend(
                OPTIONS,
                folder / f"vllm-{number}.log",
                changed(1).named_parameters,
                ServingOptions(context_length=1024, vocab_size=1024, concurrency=32),
                version=1,
                files=files,
            )
            for number in range(2)
        ]
        backend = ReplicaBackend(parts)
        try:
            await backend.start()
            yield parts
        finally:
            await backend.stop()


async def test_both_serve_what_is_published_and_a_dead_one_is_passed_by(parts: list[VllmBackend]) -> None:
    backend = ReplicaBackend(parts)
    engines = [VllmEngine(part.address) for part in parts]
    router = ReplicaRouter(engines)
    router.hold()
    publication = await backend.publish(ModelUpdate(changed(2)), 2)
    router.resume(2)
    assert publication.transferred_bytes == 2 * sum(parameter.nbytes for parameter in changed(2).parameters())
    for engine in engines:
        chunks = await collect(engine, request(prompt(1)))
        assert close(logprobs(chunks), scored(changed(2), prompt(1), ids(chunks))) and set(versions(chunks)) == {2}
    running = [
        asyncio.create_task(collect(router, replace(request(prompt(number), 900), session=str(number))))
        for number in range(4)
    ]
    await asyncio.sleep(0.5)
    assert router.running == [2, 2]
    os.kill(_server_pid(parts[0]), signal.SIGKILL)
    for number, chunks in enumerate(await asyncio.gather(*running)):
        assert len(ids(chunks)) == 900
        assert close(logprobs(chunks), scored(changed(2), prompt(number), ids(chunks)))
    router.hold()
    assert (await backend.publish(ModelUpdate(changed(3)), 3)).transferred_bytes  # to one, or to both if it is back
    router.resume(3)
    await asyncio.gather(*router._lost.values())
    assert isinstance(parts[0]._server, VllmProcess) and parts[0]._server.restarts == 1
    chunks = await collect(engines[0], request(prompt(5)))
    assert close(logprobs(chunks), scored(changed(3), prompt(5), ids(chunks))) and set(versions(chunks)) == {3}
    await router.close()
    for engine in engines:
        await engine.close()


def _server_pid(part: VllmBackend) -> int:
    children = psutil.Process(part._server.pid).children(recursive=True)
    return next(process.pid for process in children if process.name() != guardian.NAME)
