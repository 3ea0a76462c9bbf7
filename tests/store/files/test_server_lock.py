"""One server owns a PostgreSQL store: a second is refused, and one that was cut off writes only if nobody else did."""

import time

import pytest
from databases import Postgres
from sqlalchemy import text

from leyden.api.wire import RunSpec
from leyden.records import Metric
from leyden.store.database import Database
from leyden.store.errors import StoreInUse, StoreLost, StoreUnavailable, StoreUnusable
from leyden.store.files import ownership
from leyden.store.read import queries
from leyden.store.store import Store


@pytest.fixture
def database(postgres: Postgres | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ownership, "_WAIT_S", 1)
    if postgres is None:
        pytest.skip("no PostgreSQL server on this machine")
    return postgres.new_database()


def cut_off_writer(location: str) -> None:
    """End the connection that holds the lock, as a restart of PostgreSQL or a broken network does."""
    other = Database(location, readonly=True)
    with other.reader.begin() as connection:
        here = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        holders = f"SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND {here}"
        assert connection.execute(text(holders)).scalars().all() == [True]
    other.close()


async def test_a_second_server_is_refused_and_readers_are_not(database: str) -> None:
    store = await Store(database).start()
    await store.create_run(RunSpec("r"))
    with pytest.raises(StoreInUse, match="is in use by another server: stop that one") as refusal:
        Database(database)
    assert "\n" not in str(refusal.value)
    reader = Database(database, readonly=True)
    with reader.reader.begin() as connection:
        assert queries.list_run_ids(connection) == ["r"]
    await store.record_metrics("r", [Metric(1, "x", 0.0)])  # while a reader has the store open
    reader.close()
    await store.close()
    Database(database).close()


async def test_a_schema_of_the_same_database_is_another_store(database: str) -> None:
    store = await Store(database).start()
    with store.database.reader.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("CREATE SCHEMA second"))
    second = await Store(f"{database}?options=-csearch_path%3Dsecond").start()
    await second.create_run(RunSpec("r"))
    assert await store.read(queries.list_run_ids) == []
    await second.close()
    await store.close()


async def test_a_connection_that_is_lost_gets_the_lock_again(database: str) -> None:
    store = await Store(database).start()
    await store.create_run(RunSpec("r"))
    cut_off_writer(database)
    await store.record_metrics("r", [Metric(1, "x", 0.0)])
    with pytest.raises(StoreInUse):
        Database(database)
    await store.close()


async def test_nothing_is_acknowledged_while_another_has_the_lock(database: str) -> None:
    """One that leaves no mark: as the own connection of before, which PostgreSQL has not yet missed."""
    store = await Store(database).start()
    await store.create_run(RunSpec("r"))
    holder = Database(database, readonly=True)
    with holder.reader.connect() as connection:
        cut_off_writer(database)
        connection.execute(text(ownership._LOCK))
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="is in use by another server"):
            await store.record_metrics("r", [Metric(1, "x", 0.0)])
        assert time.monotonic() - started >= 1 and not store.lost.done()
        connection.invalidate()
    holder.close()
    await store.record_metrics("r", [Metric(1, "x", 0.0)])
    await store.close()


@pytest.mark.parametrize("ended", [True, False])
async def test_a_server_that_was_cut_off_is_lost_if_another_has_used_the_store(database: str, ended: bool) -> None:
    first = await Store(database).start()
    await first.create_run(RunSpec("r"))
    cut_off_writer(database)
    second = await Store(database).start()
    await second.create_run(RunSpec("second"))
    if ended:
        await second.close()
    with pytest.raises(StoreLost, match="another server has used"):
        await first.record_metrics("r", [Metric(1, "x", 0.0)])
    assert first.lost.done()
    if not ended:
        await second.record_metrics("second", [Metric(1, "x", 0.0)])
        await second.close()
    await first.close()


async def test_a_reader_of_an_empty_database_creates_nothing(postgres: Postgres | None) -> None:
    if postgres is None:
        pytest.skip("no PostgreSQL server on this machine")
    database = postgres.new_database("template1")
    with pytest.raises(StoreUnusable, match="is empty: name another database"):
        Database(database, readonly=True)
    await (await Store(database).start()).close()
