"""LoRA adapters in a real vLLM on the CPU: each version is sampled with its own adapter, also after a crash."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
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
from spark_vllm import running as count_running
from torch import Tensor

from leyden.config import AdapterConfig
from leyden.engine.protocol import EngineError, LoraWeights
from leyden.engine.vllm.adapters import AdapterBackend, AdapterServer
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.launch import adapter_arguments
from leyden.engine.vllm.process import RunningVllm
from leyden.engine.vllm.publisher import AdapterTransfer
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles
from leyden.learner.lora import LoraAdapter
from leyden.process import guardian
from leyden.records import Sampling
from leyden.rendering.tokenizer import Tokenizer

RANK = 4


def trained(seed: int) -> LoraAdapter:
    """An adapter after an update that is large enough to be seen in every logprob."""
    adapter = LoraAdapter(spark(), AdapterConfig(rank=RANK, alpha=12))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapter.publish()
    return adapter


class AdapterUpdate:
    """The weights of an adapter."""

    def __init__(self, adapter: LoraAdapter) -> None:
        self._adapter = adapter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("only the adapter is sent")

    def adapter(self) -> LoraWeights:
        return self._adapter.weights()


def test_an_adapter_and_its_base_are_the_served_model() -> None:
    adapter = trained(1)
    tensors = adapter.weights().tensors
    base = dict(adapter.base_tensors())
    assert {name: tuple(each.shape) for name, each in base.items()} == {
        name: tuple(each.shape) for name, each in spark().named_parameters()
    }
    layer = "model.layers.0.mlp.up_proj"
    merged = base[f"{layer}.weight"] + tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    torch.testing.assert_close(merged, adapter._served.get_submodule(layer).weight.detach())


SERVING = ServingOptions(context_length=1024, vocab_size=1024, concurrency=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdapterServer]:
    log = tmp_path_factory.mktemp("adapters") / "vllm.log"
    writer, checker = trained(3), trained(103)
    server = AdapterServer(
        replace(OPTIONS, arguments=(*OPTIONS.arguments, *adapter_arguments(RANK, 2))),
        log,
        writer.base_tensors,
        {"writer": (writer.weights, 3), "checker": (checker.weights, 103)},
        replace(SERVING, tokenizer=Tokenizer.load(SPARK).control_json),
        files=WeightFiles(),
    )
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@pytest.fixture
def backend(server: AdapterServer) -> AdapterBackend:
    return AdapterBackend(server, "writer")


async def samples_version(engine: VllmEngine, version: int) -> bool:
    """Whether the engine samples what the merged model of a version would."""
    chunks = await collect(engine, request(prompt(1)))
    assert set(versions(chunks)) == {version}
    return close(logprobs(chunks), scored(trained(version)._served, prompt(1), ids(chunks)))


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_each_version_is_sampled_with_its_own_adapter(backend: AdapterBackend) -> None:
    engine = VllmEngine(backend.address)
    assert await samples_version(engine, 3)
    for version in (4, 5, 4):  # the best checkpoint is published again under its own version
        engine.hold()
        publication = await backend.publish(AdapterUpdate(trained(version)), version)
        engine.resume(version)
        assert await samples_version(engine, version)
        assert publication.transferred_bytes == sum(each.nbytes for each in trained(4).weights().tensors.values())
    await engine.close()


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_that_did_not_arrive_is_found(
    backend: AdapterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def skip(
        self: AdapterTransfer, client: object, policy: str, adapter: LoraWeights, *rest: object
    ) -> dict[str, Tensor]:
        return adapter.tensors

    with monkeypatch.context() as patch:
        patch.setattr(AdapterTransfer, "send", skip)
        patch.setattr(type(backend._server._server), "recovered", _never)
        with pytest.raises(EngineError, match=r"after publishing, \d+ of \d+ tensors in the engine differ"):
            await backend.publish(AdapterUpdate(trained(6)), 6)
    await backend.publish(AdapterUpdate(trained(7)), 7)


async def _never(self: object) -> bool:
    return False


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_a_restarted_server_gets_the_latest_adapter_of_every_policy(backend: AdapterBackend) -> None:
    await backend.publish(AdapterUpdate(trained(8)), 8)
    found = psutil.Process(backend._server._server.pid).children(recursive=True)
    os.kill(next(process.pid for process in found if process.name() != guardian.NAME), signal.SIGKILL)
    assert await backend._server._server.recovered()
    checker = AdapterBackend(backend._server, "checker").address
    for address, version in ((backend.address, 8), (checker, checker.version)):
        engine = VllmEngine(address)
        assert await samples_version(engine, version)
        await engine.close()


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_weights_that_the_adapter_does_not_belong_to_are_refused(tmp_path: Path) -> None:
    adapter = trained(3)
    server = AdapterServer(
        replace(OPTIONS, arguments=(*OPTIONS.arguments, *adapter_arguments(RANK))),
        tmp_path / "vllm.log",
        changed(1).named_parameters,
        {"policy": (adapter.weights, 3)},
        SERVING,
        files=WeightFiles(),
    )
    try:
        with pytest.raises(EngineError, match=r"before the adapter is loaded, .* differ from the trainer's"):
            await AdapterBackend(server, "policy").start()
    finally:
        await server.stop()


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_one_adapter_is_published_while_the_requests_of_the_other_run(server: AdapterServer) -> None:
    backends = {name: AdapterBackend(server, name) for name in ("writer", "checker")}
    engines = {name: VllmEngine(backend.address) for name, backend in backends.items()}
    first = {name: backend.address.version for name, backend in backends.items()}
    long = {name: [*prompt(seed)] for name, seed in (("writer", 1), ("checker", 2))}
    running = {name: asyncio.create_task(collect(engine, request(long[name], 800))) for name, engine in engines.items()}
    while await count_running(str(server._server.location)) < 2:  # noqa: ASYNC110 - vLLM does not announce it
        await asyncio.sleep(0.05)
    engines["writer"].hold()
    await backends["writer"].publish(AdapterUpdate(trained(9)), 9)
    assert not running["checker"].done()
    engines["writer"].resume(9)
    found = {name: await task for name, task in running.items()}
    assert set(versions(found["checker"])) == {first["checker"]}
    assert set(versions(found["writer"])) == {first["writer"], 9}
    for name, chunks in found.items():
        sampled, seen = ids(chunks), versions(chunks)
        for version in set(seen):
            scores = scored(trained(version)._served, long[name], sampled)
            pairs = zip(logprobs(chunks), scores, seen, strict=True)
            own = [(ours, theirs) for ours, theirs, of in pairs if of == version]
            assert close([ours for ours, _ in own], [theirs for _, theirs in own]), (name, version)
    greedy = request(prompt(5), sampling=Sampling(temperature=0))
    answers = {name: ids(await collect(engine, greedy)) for name, engine in engines.items()}
    assert answers["writer"] != answers["checker"]
    for engine in engines.values():
        await engine.close()


class Recorder:
    """Records what a vLLM is told."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __getattr__(self, told: str) -> Any:
        async def record(*given: object) -> int:
            self._events.append(" ".join([told, *(str(one) for one in given if isinstance(one, str | int))]))
            return 1

        return record


@pytest.mark.parametrize("policies", [("writer",), ("writer", "checker")])
async def test_only_a_policy_that_has_vllm_for_itself_pauses_it(
    policies: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, events = trained(1), list[str]()
    first = {name: (adapter.weights, number) for number, name in enumerate(policies)}
    serving = replace(SERVING, url="unix:/nowhere.sock")
    server = AdapterServer(OPTIONS, tmp_path / "log", adapter.base_tensors, first, serving, files=WeightFiles())
    recorder: Any = Recorder(events)
    monkeypatch.setattr(server, "_publisher", recorder)
    monkeypatch.setattr(server, "_new_publisher", lambda: recorder)
    monkeypatch.setattr(RunningVllm, "start", recorder.start)
    backends = [AdapterBackend(server, name) for name in policies]
    for backend in backends:
        await backend.start()
    sent = [f"send_adapter {name} {number}" for number, name in enumerate(policies)]
    assert events == ["start", "pause", *sent, "resume"]
    events.clear()
    await backends[0].publish(AdapterUpdate(adapter), 7)
    alone = len(policies) == 1
    assert events == ["pause", "send_adapter writer 7", "resume"] if alone else ["send_adapter writer 7"]
    events.clear()
    await server._restarted()
    assert events == ["pause", "send_adapter writer 7", *sent[1:], "resume"]
    assert [backend.address.version for backend in backends] == [7, 1][: len(policies)]
    await server.stop()
