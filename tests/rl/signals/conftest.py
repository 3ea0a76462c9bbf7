"""What is shared here, and where workers are tested."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "client"))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Any]:
    from worksite import worksite

    async with worksite(tmp_path) as running:
        yield running
