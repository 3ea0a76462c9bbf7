"""LoRA adapters in a real vLLM on the CPU: each version is sampled with its own adapter, also after a crash."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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
from torch import Tensor

from leyden.config import AdapterConfig
from leyden.engine.protocol import EngineError, LoraWeights
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.launch import adapter_arguments
from leyden.engine.vllm.publisher import AdapterTransfer
from leyden.engine.weight_files import WeightFiles
from leyden.learner.lora import LoraAdapter
from leyden.process import guardian
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmBackend]:
    log = tmp_path_factory.mktemp("adapters") / "vllm.log"
    adapter = trained(3)
    backend = VllmBackend(
        replace(OPTIONS, arguments=(*OPTIONS.arguments, *adapter_arguments(RANK))),
        log,
        adapter.base_tensors,
        adapter=adapter.weights,
        context_length=1024,
        vocab_size=1024,
        concurrency=32,
        files=WeightFiles(),
        tokenizer=Tokenizer.load(SPARK).control_json,
        version=3,
    )
    try:
        await backend.start()
        yield backend
    finally:
        await backend.stop()


async def samples_version(engine: VllmEngine, version: int) -> bool:
    """Whether the engine samples what the merged model of a version would."""
    chunks = await collect(engine, request(prompt(1)))
    assert set(versions(chunks)) == {version}
    return close(logprobs(chunks), scored(trained(version)._served, prompt(1), ids(chunks)))


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_each_version_is_sampled_with_its_own_adapter(backend: VllmBackend) -> None:
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
async def test_an_adapter_that_did_not_arrive_is_found(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def skip(self: AdapterTransfer, client: object, adapter: LoraWeights, *rest: object) -> dict[str, Tensor]:
        return adapter.tensors

    with monkeypatch.context() as patch:
        patch.setattr(AdapterTransfer, "send", skip)
        patch.setattr(type(backend._server), "recovered", _never)
        with pytest.raises(EngineError, match=r"after publishing, \d+ of \d+ tensors in the engine differ"):
            await backend.publish(AdapterUpdate(trained(6)), 6)
    await backend.publish(AdapterUpdate(trained(7)), 7)


async def _never(self: object) -> bool:
    return False


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_a_restarted_server_gets_the_latest_adapter(backend: VllmBackend) -> None:
    await backend.publish(AdapterUpdate(trained(8)), 8)
    found = psutil.Process(backend._server.pid).children(recursive=True)  # type: ignore[union-attr]
    os.kill(next(process.pid for process in found if process.name() != guardian.NAME), signal.SIGKILL)
    assert await backend._server.recovered()
    engine = VllmEngine(backend.address)
    assert await samples_version(engine, 8)
    await engine.close()


@pytest.mark.slow
@needs_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_weights_that_the_adapter_does_not_belong_to_are_refused(tmp_path: Path) -> None:
    adapter = trained(3)
    backend = VllmBackend(
        replace(OPTIONS, arguments=(*OPTIONS.arguments, *adapter_arguments(RANK))),
        tmp_path / "vllm.log",
        changed(1).named_parameters,
        adapter=adapter.weights,
        context_length=1024,
        vocab_size=1024,
        concurrency=32,
        files=WeightFiles(),
    )
    try:
        with pytest.raises(EngineError, match=r"before the adapter is loaded, .* differ from the trainer's"):
            await backend.start()
    finally:
        await backend.stop()
