"""A real server, its scripted model, and real workers."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_harness import WorkerHarness, worker_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    async with worker_harness(tmp_path) as running:
        yield running
