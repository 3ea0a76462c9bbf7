"""A small database for the SQL agent, and the server with workers that the client's tests use."""

import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "client"))

from worker_harness import WorkerHarness, worker_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    async with worker_harness(tmp_path) as running:
        yield running


@pytest.fixture
def singers(tmp_path: Path) -> str:
    """The path of a database with one table of singers."""
    path = tmp_path / "singers.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE singer (\n  id INTEGER PRIMARY KEY,\n  name TEXT,\n  age INTEGER)")
    rows = [(1, "Ann", 30), (2, "Bob", 41), (3, "Cem", 30), (4, "Dia", 25)]
    connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return str(path)
