"""The embedded engine on a GPU: CUDA graphs, overlapping steps, a bfloat16 copy. Skipped where there is no CUDA device.

`LEYDEN_TEST_MODEL` names a model's folder (the bundled one otherwise).
"""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from small_engines import publish
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leyden.engine.protocol import EngineRequest, TokenChunk
from leyden.engine.torch.device_llama import DeviceLlamaForward
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.forward import Segment
from leyden.engine.torch.kv_cache import KVCache
from leyden.records import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SPARK = Path(__file__).parents[3] / "src/leyden/models/spark"
MODEL = Path(os.environ.get("LEYDEN_TEST_MODEL", SPARK))
TOLERANCE = 0.1
"""Mean difference of logprobs between the engine and Hugging Face, both in bfloat16."""


@pytest.fixture
def model() -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return loaded.cuda().eval()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(10, 900, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def requests(count: int, tokens: int) -> list[EngineRequest]:
    return [EngineRequest(prompt(i, 20 + 7 * i % 300), Sampling(seed=i), (), tokens, f"s{i}") for i in range(count)]


async def complete(engine: TorchEngine, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def difference(model: PreTrainedModel, request: EngineRequest, chunks: list[TokenChunk], first: int = 0) -> float:
    """The mean difference of logprobs from token `first` on, to a bfloat16 forward over the whole sequence."""
    ids = [id for chunk in chunks for id in chunk.ids]
    found = torch.tensor([one for chunk in chunks for one in chunk.logprobs])
    whole = torch.tensor([[*request.prompt_ids, *ids]], device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        logits = model(whole).logits[0].float()
    expected = logits.log_softmax(-1)[-len(ids) - 1 : -1].gather(1, whole[0, -len(ids) :, None])[:, 0].cpu()
    return float((found - expected)[first:].abs().mean())


def test_a_replayed_step_equals_the_computed_one_in_float32(model: PreTrainedModel) -> None:
    kv_cache = KVCache(9, 1024, torch.float32, model.device)
    forward = DeviceLlamaForward(model, kv_cache)
    with torch.inference_mode():
        forward([Segment(slot, 0, prompt(slot, 30 + 20 * slot), False) for slot in range(8)])
        for step in range(3):
            ids = [prompt(slot, 200)[30 + 20 * slot + step] for slot in range(8)]
            segments = [Segment(slot, 30 + 20 * slot + step, [ids[slot]], True) for slot in range(5)]
            logits = forward(segments).clone()
            for slot in range(5):
                whole = torch.tensor([prompt(slot, 200)[: 31 + 20 * slot + step]], device="cuda")
                whole[0, : 30 + 20 * slot] = torch.tensor(prompt(slot, 30 + 20 * slot))
                expected = model(whole).logits[0, -1]
                torch.testing.assert_close(logits[slot], expected, atol=2e-2, rtol=1e-3)


async def test_logprobs_are_the_trainers(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=64)
    asked = requests(150, 60)
    answers = await asyncio.gather(*(complete(engine, request) for request in asked))
    for request, chunks in zip(asked, answers, strict=True):
        assert sum(len(chunk.ids) for chunk in chunks) == 60
        assert difference(model, request, chunks) < TOLERANCE
    engine.close()


async def test_tokens_after_an_update_are_of_the_new_weights(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=32)
    asked = requests(32, 600)
    answers: list[list[TokenChunk]] = [[] for _ in asked]
    begun = asyncio.Event()

    async def read(request: EngineRequest, chunks: list[TokenChunk]) -> None:
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if all(len(one) > 1 for one in answers):
                begun.set()

    readers = [asyncio.create_task(read(*one)) for one in zip(asked, answers, strict=True)]
    await asyncio.wait([asyncio.create_task(begun.wait()), *readers], return_when=asyncio.FIRST_COMPLETED)

    @torch.no_grad()
    def scale() -> None:
        for parameter in model.parameters():
            parameter.mul_(0.9)

    publication = await publish(engine, 1, scale)
    print(f"published in {publication.seconds:.3f} s")
    await asyncio.gather(*readers)
    for request, chunks in zip(asked, answers, strict=True):
        versions = [chunk.version for chunk in chunks for _ in chunk.ids]
        assert versions == sorted(versions) and set(versions) <= {0, 1} and len(versions) == 600
        assert difference(model, request, chunks, versions.index(1)) < TOLERANCE
    engine.close()


async def test_the_trainer_computes_gradients_while_graphs_are_captured(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=64)

    def learn() -> Tensor:
        ids = torch.tensor([prompt(9, 200)], device="cuda")
        for _ in range(20):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
        grad = next(iter(model.parameters())).grad
        assert grad is not None
        return grad.clone()

    alone = learn()
    going = asyncio.gather(*(complete(engine, request) for request in requests(64, 200)))
    beside = await asyncio.to_thread(learn)
    await going
    torch.testing.assert_close(alone, beside, atol=1e-4, rtol=1e-2)
    engine.close()
