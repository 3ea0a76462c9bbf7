"""A real vLLM on the CPU that divides the model over two workers serves what is published, and its parts are compared."""

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from spark_vllm import OPTIONS, changed, close, collect, ids, logprobs, needs_vllm, prompt, request, scored
from test_backend import ModelUpdate

from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.weight_files import WeightFiles

pytestmark = [pytest.mark.slow, needs_vllm]


async def test_a_divided_model_serves_what_is_published(tmp_path: Path) -> None:
    options = replace(
        OPTIONS,
        arguments=(*OPTIONS.arguments, "--tensor-parallel-size", "2"),
        environment={**OPTIONS.environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with closing(WeightFiles()) as files:
        backend = VllmBackend(
            options,
            tmp_path / "vllm.log",
            changed(1).named_parameters,
            context_length=1024,
            vocab_size=1024,
            concurrency=32,
            files=files,
        )
        try:
            await backend.start()
            engine = VllmEngine(backend.address)
            chunks = await collect(engine, request(prompt(1)))
            assert close(logprobs(chunks), scored(changed(1), prompt(1), ids(chunks)))
            engine.hold()
            await backend.publish(ModelUpdate(changed(2)), 1)
            engine.resume(1)
            chunks = await collect(engine, request(prompt(1)))
            assert close(logprobs(chunks), scored(changed(2), prompt(1), ids(chunks)))
            await engine.close()
        finally:
            await backend.stop()
