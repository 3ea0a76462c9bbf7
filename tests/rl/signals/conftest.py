"""What is shared here, and where workers are tested."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "client"))


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Any]:
    from worker_harness import worker_harness

    async with worker_harness(tmp_path) as running:
        yield running
