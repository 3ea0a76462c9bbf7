"""A store on every database that it supports, in a time that passes when a test says so."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from databases import Postgres, empty_store

from leyden.api.wire import RunSpec
from leyden.records import RunSettings
from leyden.store.store import Store


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres | None) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        location = str(empty_store(tmp_path / "leyden.db"))
    elif postgres is None:
        pytest.skip("no PostgreSQL server on this machine")
    else:
        location = postgres.new_database()
    opened = await Store(location, Clock()).start()
    await opened.create_run(RunSpec("r", RunSettings(lease_s=60, max_attempts=2)))
    yield opened
    await opened.close()
