"""A real vLLM server on the CPU with the bundled model."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from spark_vllm import OPTIONS

from leyden.engine.protocol import VllmAddress
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.process import VllmProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmProcess]:
    process = VllmProcess(OPTIONS, tmp_path_factory.mktemp("vllm") / "vllm.log")
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(vllm: VllmProcess) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmAddress(str(vllm.socket), 1024, 1024, 32))
    yield engine
    await engine.close()
