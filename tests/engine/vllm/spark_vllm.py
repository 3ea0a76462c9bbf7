"""The bundled model in vLLM and in Hugging Face: requests, what came of them, and what it should have been."""

import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from leyden.engine.protocol import Engine, EngineRequest, TokenChunk
from leyden.engine.vllm.http import control
from leyden.engine.vllm.launch import VllmOptions
from leyden.records import Sampling

PYTHON = os.environ.get("LEYDEN_VLLM_PYTHON", str(Path(__file__).parents[3] / ".venv-vllm/bin/python"))
needs_vllm = pytest.mark.skipif(shutil.which(PYTHON) is None, reason="there is no vLLM: run `make vllm-env`")
SPARK = Path(__file__).parents[3] / "src/leyden/models/spark"
TOLERANCE = 2e-3
NEVER = 1023
"""A stop id that is hardly ever sampled."""
OPTIONS = VllmOptions(
    model=SPARK,
    python=PYTHON,
    dtype="float32",
    max_model_len=1024,
    arguments=("--enforce-eager", "--max-num-seqs", "32"),
    environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
)


def request(prompt: Iterable[int], max_tokens: int = 24, *, stop: int = NEVER, **more: object) -> EngineRequest:
    sampling = more.pop("sampling", Sampling())
    assert isinstance(sampling, Sampling)
    return EngineRequest(tuple(prompt), sampling, (stop,), max_tokens, "session", **more)


async def collect(engine: Engine, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def ids(chunks: Iterable[TokenChunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


def logprobs(chunks: Iterable[TokenChunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


def versions(chunks: Iterable[TokenChunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.ids]


def scored(model: PreTrainedModel, prompt: Iterable[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """What Hugging Face says of sampled tokens."""
    whole = torch.tensor([[*prompt, *sampled]], device=model.device)
    with torch.inference_mode():
        logits = model(whole).logits[0].float() / temperature
    steps = logits.log_softmax(-1)[-len(sampled) - 1 : -1]
    return [float(step[id]) for step, id in zip(steps, sampled, strict=True)]


def close(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and max(abs(a - b) for a, b in zip(left, right, strict=True)) < TOLERANCE


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(10, 1000), k=length)


def spark() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(SPARK, dtype=torch.float32)


def changed(seed: int) -> PreTrainedModel:
    """The model after an update that is large enough to be seen in every logprob."""
    model = spark()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


async def running(socket: str) -> float:
    async with control(socket) as client, client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))
