"""A trainer's vLLM on the CPU: what it publishes is served, also after a crash."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace
from spark_vllm import (
    OPTIONS,
    SPARK,
    changed,
    close,
    collect,
    ids,
    logprobs,
    needs_vllm,
    prompt,
    request,
    scored,
    spark,
    versions,
)
from torch import Tensor
from transformers import PreTrainedModel

from leyden.engine.protocol import EngineError, EngineLost
from leyden.engine.vllm import process as vllm_process
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.http import control, is_healthy
from leyden.engine.vllm.process import RunningVllm, VllmProcess
from leyden.engine.vllm.publisher import VllmPublisher
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles
from leyden.process import guardian
from leyden.records import Sampling
from leyden.rendering.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.asyncio(loop_scope="module")]


class ModelUpdate:
    """The weights of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_parameters()

    def adapter(self) -> None:
        return None


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    tmp_path_factory: pytest.TempPathFactory, module_patch: pytest.MonkeyPatch
) -> AsyncIterator[VllmBackend]:
    module_patch.setattr(vllm_process, "_MAX_CRASHES", 100)  # these tests kill it more often than a run allows
    log = tmp_path_factory.mktemp("backend") / "vllm.log"
    model = changed(1)
    backend = VllmBackend(
        OPTIONS,
        log,
        model.named_parameters,
        ServingOptions(
            context_length=1024, vocab_size=1024, concurrency=32, tokenizer=Tokenizer.load(SPARK).control_json
        ),
        files=WeightFiles(),
        version=3,
    )
    try:
        await backend.start()
        yield backend
    finally:
        await backend.stop()
    assert not _processes_with(Path(backend.address.location).parent.name)


def _processes_with(word: str) -> list[Path]:
    """The processes that have a word in their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (process / "cmdline").read_bytes():
                found.append(process)
    return found


async def test_it_starts_with_the_trainers_weights_and_serves_what_is_published(backend: VllmBackend) -> None:
    engine = VllmEngine(backend.address)
    chunks = await collect(engine, request(prompt(1)))
    assert close(logprobs(chunks), scored(changed(1), prompt(1), ids(chunks)))
    assert set(versions(chunks)) == {3}
    engine.hold()
    publication = await backend.publish(ModelUpdate(changed(2)), 4)
    engine.resume(4)
    assert publication.seconds > 0
    assert publication.transferred_bytes == sum(parameter.nbytes for parameter in spark().parameters())
    chunks = await collect(engine, request(prompt(1)))
    assert close(logprobs(chunks), scored(changed(2), prompt(1), ids(chunks)))
    assert set(versions(chunks)) == {4}
    await engine.close()


async def test_text_of_a_grammar_never_matches_a_control_token(backend: VllmBackend) -> None:
    engine = VllmEngine(backend.address)
    marks = set(Tokenizer.load(SPARK).control_tokens.values())
    sampling = Sampling(temperature=2.0)  # the highest that vLLM takes
    chunks = await collect(engine, request(prompt(4), 500, stop=2, sampling=sampling, grammar=r"start: /(.|\n){900}/"))
    assert len(ids(chunks)) > 100 and not marks.intersection(ids(chunks)[:-1])
    await engine.close()


@pytest.mark.parametrize("part", ["server", "engine core"])
async def test_a_killed_server_is_restarted_with_the_published_weights(backend: VllmBackend, part: str) -> None:
    engine = VllmEngine(replace(backend.address, version=5))
    await backend.publish(ModelUpdate(changed(5)), 5)
    before = _restarts(backend)
    generation = asyncio.create_task(collect(engine, request(prompt(2), 900)))
    await asyncio.sleep(0.2)
    os.kill(_server_pid(backend) if part == "server" else _engine_core_pid(backend), signal.SIGKILL)
    with pytest.raises(EngineLost):
        await generation
    chunks = await collect(engine, request(prompt(2)))  # it waits for the restart
    assert _restarts(backend) == before + 1
    assert chunks[0].restarting and not chunks[-1].restarting
    assert close(logprobs(chunks), scored(changed(5), prompt(2), ids(chunks)))
    await engine.close()


async def test_a_sleeping_server_wakes_with_what_is_published(backend: VllmBackend) -> None:
    engine = VllmEngine(backend.address)
    generation = asyncio.create_task(collect(engine, request(prompt(7), 900)))
    await asyncio.sleep(0.2)
    engine.hold()
    await backend.sleep()
    await backend.sleep()  # it sleeps already
    assert await _is_sleeping(backend)
    await backend.publish(ModelUpdate(changed(7)), 7)
    assert not await _is_sleeping(backend)
    engine.resume(7)
    chunks = await generation
    assert versions(chunks) == sorted(versions(chunks)) and versions(chunks)[-1] == 7
    last = versions(chunks).index(7)
    assert close(logprobs(chunks)[last:], scored(changed(7), prompt(7), ids(chunks))[last:])
    await engine.close()


async def test_a_server_that_crashes_asleep_is_restarted_when_it_is_published_to(backend: VllmBackend) -> None:
    await backend.sleep()
    os.kill(_server_pid(backend), signal.SIGKILL)
    server = backend._server
    assert isinstance(server, VllmProcess) and server._process is not None
    await server._down.wait()
    await asyncio.sleep(0.5)
    assert server._process.status is not None  # it is not restarted: its memory is in use
    await backend.publish(ModelUpdate(changed(8)), 8)
    engine = VllmEngine(backend.address)
    chunks = await collect(engine, request(prompt(8)))
    assert close(logprobs(chunks), scored(changed(8), prompt(8), ids(chunks)))
    await engine.close()


async def _is_sleeping(backend: VllmBackend) -> bool:
    async with control(backend.address.location) as client, client.get("/is_sleeping") as response:
        return bool((await response.json())["is_sleeping"])


class KillingUpdate(ModelUpdate):
    """Weights during whose delivery vLLM is killed, while `kills` are left."""

    def __init__(self, model: PreTrainedModel, backend: VllmBackend) -> None:
        super().__init__(model)
        self._backend, self.kills = backend, 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.kills:
            self.kills -= 1
            os.kill(_server_pid(self._backend), signal.SIGKILL)
        return super().tensors()


async def test_a_server_that_crashes_again_while_it_gets_the_weights_is_restarted_again(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = KillingUpdate(changed(6), backend)
    update.kills = 1  # during the publication
    restarted, create = [False], backend._new_publisher

    def create_and_kill() -> VllmPublisher:
        if not restarted[0]:  # during the delivery after the restart, whose weights are in files by now
            restarted[0] = True
            os.kill(_server_pid(backend), signal.SIGKILL)
        return create()

    monkeypatch.setattr(backend, "_new_publisher", create_and_kill)
    publication = await backend.publish(update, 6)
    assert (publication.transferred_bytes, update.kills, restarted) == (0, 0, [True])
    engine = VllmEngine(backend.address)
    chunks = await collect(engine, request(prompt(6)))
    assert close(logprobs(chunks), scored(changed(6), prompt(6), ids(chunks)))
    await engine.close()


def _restarts(backend: VllmBackend) -> int:
    assert isinstance(backend._server, VllmProcess)
    return backend._server.restarts


def _server_pid(backend: VllmBackend) -> int:
    return _processes(backend)[0].pid


def _engine_core_pid(backend: VllmBackend) -> int:
    """The process that computes, which vLLM's server starts."""
    return next(process.pid for process in _processes(backend) if "EngineCore" in " ".join(process.cmdline()))


def _processes(backend: VllmBackend) -> list[psutil.Process]:
    """The processes of vLLM, the first of which is its server."""
    found = psutil.Process(backend._server.pid).children(recursive=True)
    return [process for process in found if process.name() != guardian.NAME]


async def test_a_server_that_cannot_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    process = VllmProcess(replace(OPTIONS, model=tmp_path), tmp_path / "vllm.log")
    with pytest.raises(
        EngineError, match=r"vLLM did not start \(status 1\): .*Invalid repository ID or local directory"
    ):
        await process.start()
    await process.stop()


async def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    process = VllmProcess(replace(OPTIONS, python="/nowhere/python"), tmp_path / "vllm.log")
    with pytest.raises(EngineError, match="/nowhere/python has no vLLM"):
        await process.start()
    await process.stop()


async def test_a_server_that_runs_already_gets_the_weights_and_outlives_the_backend(tmp_path: Path) -> None:
    socket, model = tmp_path / "vllm.sock", changed(3)
    words = ["-m", "leyden.engine.vllm", str(SPARK), "--uds", str(socket), "--python", OPTIONS.python]
    words += ["--max-model-len", "1024", "--dtype", "float32", *OPTIONS.arguments]
    variables = {**os.environ, **OPTIONS.environment}
    with (tmp_path / "vllm.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            sys.executable, *words, env=variables, stdout=log, stderr=log, start_new_session=True
        )
    try:
        async with control(str(socket)) as client:
            while not await is_healthy(client):
                assert server.returncode is None, (tmp_path / "vllm.log").read_text()[-2000:]
                await asyncio.sleep(0.5)
        backend = VllmBackend(
            OPTIONS,
            tmp_path / "none.log",
            model.named_parameters,
            ServingOptions(context_length=1024, vocab_size=1024, concurrency=32, url=f"unix:{socket}"),
            files=WeightFiles(),
        )
        await backend.start()
        failing = asyncio.create_task(backend.wait_failed())
        engine = VllmEngine(backend.address)
        chunks = await collect(engine, request(prompt(3)))
        assert close(logprobs(chunks), scored(model, prompt(3), ids(chunks)))
        await engine.close()
        assert not failing.done()
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="no longer answers: start it, then resume the run"):
            await failing
        await backend.stop()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        await server.wait()


async def test_an_address_where_no_vllm_answers_is_refused() -> None:
    with pytest.raises(EngineError, match="no vLLM answers at"):
        await RunningVllm("http://127.0.0.1:9").start()
