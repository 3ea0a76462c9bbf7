"""A real vLLM on the CPU that divides a model over two workers serves what is published, and its parts are compared."""

import copy
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from spark_vllm import OPTIONS, SPARK, close, collect, ids, logprobs, needs_vllm, prompt, request, scored
from test_backend import ModelUpdate
from transformers import AutoConfig, LlamaForCausalLM

from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles

pytestmark = [pytest.mark.slow, needs_vllm]


@torch.no_grad()
def random_model(seed: int) -> LlamaForCausalLM:
    """A model like the bundled one with one head for keys and values, which both workers have."""
    config = copy.copy(AutoConfig.from_pretrained(SPARK))
    config.num_key_value_heads = 1
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model.float().eval()


async def test_a_divided_model_serves_what_is_published(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model(0).save_pretrained(folder)
    for file in SPARK.glob("*token*"):
        shutil.copy(file, folder)
    options = replace(
        OPTIONS,
        model=folder,
        arguments=(*OPTIONS.arguments, "--tensor-parallel-size", "2"),
        environment={**OPTIONS.environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with closing(WeightFiles()) as files:
        backend = VllmBackend(
            options,
            tmp_path / "vllm.log",
            random_model(1).named_parameters,
            ServingOptions(context_length=1024, vocab_size=1024, concurrency=32),
            files=files,
        )
        try:
            await backend.start()
            engine = VllmEngine(backend.address)
            for version in (1, 2):
                chunks = await collect(engine, request(prompt(1)))
                assert close(logprobs(chunks), scored(random_model(version), prompt(1), ids(chunks)))
                engine.hold()
                await backend.publish(ModelUpdate(random_model(version + 1)), version)
                engine.resume(version)
            await engine.close()
        finally:
            await backend.stop()
