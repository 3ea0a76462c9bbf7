"""A SQLite store whose files are deleted, moved or replaced while it is open: nothing more is acknowledged."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import delete_store

from leyden.api.wire import RunSpec
from leyden.records import Metric
from leyden.store.database import Database
from leyden.store.errors import StoreLost
from leyden.store.store import Store


def delete(path: Path) -> None:
    delete_store(path.parent)


def files_below(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


def move(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def delete_log(path: Path) -> None:
    path.with_name("leyden.db-wal").unlink()


def delete_lock(path: Path) -> None:
    path.with_name("leyden.db.lock").unlink()


@pytest.mark.parametrize("lose", [delete, move, replace, delete_log, delete_lock])
async def test_a_write_to_files_that_are_not_in_their_place_is_refused(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    path = tmp_path / "home" / "leyden.db"
    store = await Store(path).start()
    await store.create_run(RunSpec("r"))
    lose(path)
    writes = (store.record_metrics("r", [Metric(step, "x", 0.0)]) for step in range(20))
    refused = await asyncio.gather(*writes, return_exceptions=True)
    assert all(isinstance(one, StoreLost) for one in refused)
    assert store.lost.done() and "\n" not in str(store.lost.result())
    with pytest.raises(StoreLost):
        await store.create_run(RunSpec("second"))
    left = files_below(tmp_path)
    await store.close()
    assert files_below(tmp_path) <= left


async def test_an_idle_store_notices_that_it_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.store.store._WATCH_S", 0.01)
    store = await Store(tmp_path / "leyden.db").start()
    watching = asyncio.create_task(store.watch())
    delete(tmp_path / "leyden.db")
    async with asyncio.timeout(60):
        assert "leyden.db is gone" in str(await store.lost)
        await watching
    await store.close()


async def test_a_store_goes_on_after_its_space_was_freed(tmp_path: Path) -> None:
    """The connection for writing is replaced then, and SQLite may remove the log with the last connection."""
    store = await Store(tmp_path / "leyden.db").start()
    for number in range(3):
        await store.create_run(RunSpec(f"r{number}"))
        await store.delete_run(f"r{number}")
    store.database.reader.dispose()
    store.database.shrink()
    await store.create_run(RunSpec("r"))
    delete(tmp_path / "leyden.db")
    store.database.shrink()
    with pytest.raises(StoreLost):
        await store.create_run(RunSpec("r"))
    await store.close()


def test_a_store_that_must_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreLost, match=r"leyden\.db is gone"):
        Database(tmp_path / "leyden.db", create=False)
    assert not [*tmp_path.iterdir()]
    Database(tmp_path / "leyden.db").close()
    Database(tmp_path / "leyden.db", create=False).close()
