"""An embedded engine in its own process serves the weights that were published last, also after it was killed."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from modelserving import eventually
from msgspec.structs import replace
from small_engines import check, complete, make_request
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leyden.engine.protocol import EngineError, EngineLost, TokenChunk
from leyden.engine.remote import SocketEngine
from leyden.engine.torch import process as process_module
from leyden.engine.torch.__main__ import _kv_cache_bytes
from leyden.engine.torch.process import TorchProcess
from leyden.engine.torch.shared_weights import SharedWeights
from leyden.engine.torch.wire import EngineProcessOptions
from leyden.engine.weight_files import WeightFiles
from leyden.models.source import find_model
from leyden.process.host import ProcessHost
from leyden.process.place import FindPlace, Place, RemotePlace, this_machine

SPARK = find_model("spark", ".").folder
STAND_IN = """
import json, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
sys.stdin.readline()
while (folder / "slow").exists():
    time.sleep(0.01)
print("null", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with (folder / "loaded").open("a") as loaded:
        print(order["version"], file=loaded)
    if (folder / "broken").exists():
        sys.exit("no memory")
    checksums = json.loads((folder / "checksums").read_text())
    print(json.dumps({"context_length": 10, "vocab_size": 5, "checksums": checksums}), flush=True)
"""
"""Answers as an engine process does, and takes no second to start."""


class ModelUpdate:
    """The weights of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_parameters()

    def adapter(self) -> None:
        return None


class StandIn:
    """A supervised process that stands in for an engine, and the trainer's weights."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model = folder, torch.nn.Linear(2, 2)
        command = [sys.executable, "-S", "-c", STAND_IN, str(folder)]
        monkeypatch.setattr(process_module, "module_command", lambda module: command)

    @asynccontextmanager
    async def started(
        self, find_place: FindPlace = this_machine, written: WeightFiles | SharedWeights | None = None
    ) -> AsyncIterator[TorchProcess]:
        options = EngineProcessOptions(model="", dtype="float32", slots=4)
        with closing(written or WeightFiles()) as files:
            first = await files.write(self.model.named_parameters, 1)
            (self.folder / "checksums").write_text(str(dict(first.checksums)).replace("'", '"'))
            parameters = self.model.named_parameters
            async with TorchProcess(options, {}, files, self.folder / "log", parameters, 1, find_place) as process:
                yield process

    @property
    def loaded(self) -> list[int]:
        """The versions that it was told to load."""
        return [int(line) for line in (self.folder / "loaded").read_text().split()]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, monkeypatch)


async def test_a_killed_process_is_started_again_with_the_latest_weights(stand_in: StandIn) -> None:
    async with stand_in.started() as process:
        assert (process.address.context_length, process.address.concurrency) == (10, 4)
        await process.publish(ModelUpdate(stand_in.model), 2)
        before = process.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: stand_in.loaded == [1, 2, 2])
        await process.publish(ModelUpdate(stand_in.model), 3)
        assert stand_in.loaded == [1, 2, 2, 3] and process.pid != before and not process.is_down


async def test_it_is_started_on_another_machine_when_one_is_lost_and_gets_its_weights_there(stand_in: StandIn) -> None:
    hosts = [ProcessHost(), ProcessHost()]
    places = [await host.open("127.0.0.1", "a node") for host in hosts]
    left = iter(places)

    async def find_place() -> Place:
        return next(left)

    async with stand_in.started(find_place) as process:
        await process.publish(ModelUpdate(stand_in.model), 2)
        assert weight_files(places[0]) == ["2/000000.safetensors", "2/000001.safetensors"]
        hosts[0].close()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: stand_in.loaded == [1, 2, 2])
        await process.publish(ModelUpdate(stand_in.model), 3)
        assert weight_files(places[1]) == ["3/000000.safetensors", "3/000001.safetensors"]
    hosts[1].close()


async def test_it_is_started_again_if_the_disk_of_its_machine_has_no_room_for_weights(stand_in: StandIn) -> None:
    hosts = [ProcessHost(), ProcessHost()]
    places = iter([await host.open("127.0.0.1", "a node") for host in hosts])

    async def find_place() -> Place:
        return next(places)

    async with stand_in.started(find_place) as process:
        weights = hosts[0]._folder / "weights"
        shutil.rmtree(weights)
        weights.touch()  # so that the next ones cannot be written
        async with asyncio.timeout(60):
            await process.publish(ModelUpdate(stand_in.model), 2)
        assert stand_in.loaded == [1, 2] and not process.is_down
    for host in hosts:
        host.close()


async def test_a_machine_that_is_lost_before_the_first_start_is_an_error_of_the_engine(stand_in: StandIn) -> None:
    host = ProcessHost()
    place = await host.open("127.0.0.1", "a node")
    host.close()

    async def find_place() -> Place:
        return place

    with pytest.raises(EngineLost, match="a node is lost"):
        async with stand_in.started(find_place):
            pass


async def test_weights_stay_while_a_slow_process_loads_them(stand_in: StandIn) -> None:
    async with stand_in.started() as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        publishing = asyncio.create_task(process.publish(ModelUpdate(stand_in.model), 2))
        await eventually(process._changing.locked)
        async with process._written.reading() as second:
            pass
        late = asyncio.create_task(process.publish(ModelUpdate(stand_in.model), 3))
        third = await process._written.write(stand_in.model.named_parameters, 3)  # as another replica would
        latest = await process._written.write(stand_in.model.named_parameters, 4)
        assert second.folder.exists() and latest.folder.exists() and not third.folder.exists()
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(publishing, late)
        assert stand_in.loaded == [1, 2, 4] and not second.folder.exists()


def weight_files(place: RemotePlace) -> list[str]:
    folder = Path(place.folder) / "weights"
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))


async def test_weights_that_are_published_while_it_is_down_arrive_with_its_next_start(stand_in: StandIn) -> None:
    async with stand_in.started() as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        publishing = asyncio.create_task(process.publish(ModelUpdate(stand_in.model), 2))
        await eventually(process._changing.locked)  # it has been told to load them
        assert not publishing.done()
        os.kill(process.pid, signal.SIGKILL)
        await publishing
        assert stand_in.loaded == [1, 2]


async def test_others_publish_while_a_process_is_slow_to_start(stand_in: StandIn) -> None:
    with closing(SharedWeights()) as shared:
        async with stand_in.started(written=shared) as process:
            assert process.pid is not None
            (stand_in.folder / "slow").touch()
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: process.is_down and process._changing.locked())
            written = await shared.write(stand_in.model.named_parameters, 2)  # as another replica does
            assert written.version == 2 and process.is_down
            (stand_in.folder / "slow").unlink()
            await process.publish(ModelUpdate(stand_in.model), 2)
            assert stand_in.loaded == [1, 2]


async def test_weights_that_arrived_otherwise_are_found(stand_in: StandIn) -> None:
    async with stand_in.started() as process:
        with pytest.raises(EngineError, match="2 of 2 tensors in the engine differ from the trainer's: bias, weight"):
            await process.publish(ModelUpdate(torch.nn.Linear(2, 2)), 2)


async def test_a_process_that_cannot_start_is_reported_with_its_last_line(stand_in: StandIn) -> None:
    (stand_in.folder / "broken").touch()
    with pytest.raises(EngineLost, match=r"did not load its weights: no memory \(.*log\)"):
        async with stand_in.started():
            pass


async def test_a_process_that_keeps_dying_fails_the_run(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_MAX_DEATHS", 2)
    async with stand_in.started() as process:
        assert process.pid is not None
        (stand_in.folder / "broken").touch()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"an engine process keeps dying: .*no memory"):
            await process.wait_failed()


def test_the_kv_cache_of_a_process_may_have_what_weights_and_logits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    options = EngineProcessOptions(model="", dtype="float32", slots=4, device_share=0.5, beside_kv_cache=30 * 2**30)
    assert _kv_cache_bytes(options) == 10 * 2**30
    assert _kv_cache_bytes(replace(options, device_share=None)) is None
    with pytest.raises(SystemExit, match=r"20.0 GiB of the GPU .* take 30.0: raise `engine.memory`"):
        _kv_cache_bytes(replace(options, device_share=0.25))


def changed(seed: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(SPARK, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


IN_BFLOAT16 = """
import torch
import leyden.engine.torch.__main__ as module

engine = module.TorchEngine
module.TorchEngine = lambda *given, **named: engine(*given, **{**named, "dtype": torch.bfloat16})
module.main()
"""
"""An engine process that samples from a copy of its parameters, as on a GPU."""


@pytest.mark.slow
async def test_a_copy_samples_with_the_weights_of_the_version_that_tokens_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "module_command", lambda module: [sys.executable, "-c", IN_BFLOAT16])
    models = [changed(seed) for seed in range(6)]
    options = EngineProcessOptions(model=str(SPARK), dtype="float32", slots=4)
    with closing(SharedWeights()) as shared:
        async with TorchProcess(options, {}, shared, tmp_path / "log", models[0].named_parameters, 0) as process:
            engine = SocketEngine(process.address)
            chunks: list[TokenChunk] = []

            async def sample() -> None:
                async for chunk in engine.generate(make_request((1, 2, 3), 1500)):
                    chunks.append(chunk)

            def samples_with(version: int) -> bool:
                return bool(chunks) and chunks[-1].version == version

            sampling = asyncio.create_task(sample())
            for version, model in enumerate(models[1:], 1):
                await eventually(partial(samples_with, version - 1))
                await process.publish(ModelUpdate(model), version)
            await sampling
            await engine.close()
    sampled = [
        (id, logprob, chunk.version) for chunk in chunks for id, logprob in zip(chunk.ids, chunk.logprobs, strict=True)
    ]
    assert [version for *_, version in sampled] == sorted(version for *_, version in sampled)
    ids = torch.tensor([[1, 2, 3, *(id for id, *_ in sampled)]])
    with torch.no_grad():
        expected = [model.bfloat16()(ids).logits[0].float().log_softmax(-1) for model in models]

    def difference(version: int, weights: int) -> float:
        """Return how far a version's logprobs are from those of some weights, on average."""
        tokens = [(at, id, logprob) for at, (id, logprob, by) in enumerate(sampled) if by == version]
        return fmean(abs(float(expected[weights][at + 2, id]) - logprob) for at, id, logprob in tokens)

    for version in range(len(models)):
        own, other = difference(version, version), difference(version, version - 1)
        assert own < 0.1 and own < other / 3, (version, own, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WeightFiles, SharedWeights])
async def test_a_real_engine_serves_what_is_published_also_after_it_was_killed(
    kind: type[WeightFiles | SharedWeights], tmp_path: Path
) -> None:
    options = EngineProcessOptions(model=str(SPARK), dtype="float32", slots=4)
    with closing(kind()) as files:
        async with TorchProcess(options, {}, files, tmp_path / "log", changed(1).named_parameters, 1) as process:
            engine = SocketEngine(process.address)
            assert await engine.is_ready() and engine.context_length == 4096
            check(changed(1), await complete(engine, make_request((1, 2, 3))))
            publication = await process.publish(ModelUpdate(changed(2)), 2)
            assert publication.transferred_bytes == sum(parameter.nbytes for parameter in changed(2).parameters())
            check(changed(2), await complete(engine, make_request((1, 2, 3))))
            generation = asyncio.create_task(complete(engine, make_request((1, 2, 3), 1000)))
            await asyncio.sleep(0.1)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="process is gone"):
                await generation
            await eventually(lambda: process.is_down)
            assert not await engine.is_ready()
            await process.publish(ModelUpdate(changed(3)), 3)  # which its next start brings
            assert await engine.is_ready()
            check(changed(3), await complete(engine, make_request((1, 2, 3))))
            await engine.close()
            folder = process._folder.path
        assert not folder.exists()
