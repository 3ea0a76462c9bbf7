"""A real server, its scripted model, and real workers."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worksite import Worksite, worksite


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Worksite]:
    async with worksite(tmp_path) as running:
        yield running
