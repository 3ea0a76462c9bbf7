"""Group commit: who shares a transaction, and what happens when one goes wrong."""

import asyncio
from pathlib import Path

import pytest

from leyden.api.wire import RunSpec
from leyden.records import Event, Metric
from leyden.store.errors import NotFound, StoreUnavailable
from leyden.store.read import queries
from leyden.store.store import Store
from leyden.store.write import recording
from leyden.store.write.writer import Transaction


async def steps(store: Store) -> list[int]:
    return [metric.step for _, metric in await store.read(queries.list_metrics, "r", after=0, limit=1000)]


async def test_writers_at_the_same_time_share_commits(store: Store) -> None:
    before = store.writer.commits
    await asyncio.gather(*(store.record_metrics("r", [Metric(step, "x", 0.0)]) for step in range(200)))
    assert await steps(store) == list(range(200))
    assert store.writer.commits - before < 100


async def test_a_subscriber_that_fails_delays_no_caller_and_no_other_subscriber(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def fail(event: Event) -> None:
        raise RuntimeError("a bug")

    store.notifications.subscribe(fail)
    store.notifications.subscribe(lambda event: seen.append(event.subject))
    async with asyncio.timeout(30):
        await store.create_run(RunSpec("second"))
    assert "second" in seen
    assert "a bug" in caplog.text


async def test_one_that_is_refused_affects_no_other(store: Store) -> None:
    results = await asyncio.gather(
        *(store.record_metrics("r" if step % 2 else "nowhere", [Metric(step, "x", 0.0)]) for step in range(50)),
        return_exceptions=True,
    )
    assert [isinstance(result, NotFound) for result in results] == [step % 2 == 0 for step in range(50)]
    assert await steps(store) == list(range(1, 50, 2))


async def test_one_that_breaks_affects_no_other(store: Store) -> None:

    def broken(tx: Transaction) -> int:
        recording.record_metrics(tx, "r", [Metric(999, "x", 0.0)])
        raise RuntimeError("a bug")

    good = [store.record_metrics("r", [Metric(step, "x", 0.0)]) for step in range(20)]
    results = await asyncio.gather(*good[:10], store.writer.run(broken), *good[10:], return_exceptions=True)
    assert isinstance(results.pop(10), RuntimeError)
    assert results == [1] * 20
    assert sorted(await steps(store)) == list(range(20))
    log = await store.read(queries.list_events, "r", after=0, kind="metrics", limit=1000)
    assert len(log) == 20


async def test_a_full_disk_refuses_and_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r"))
    with store.database.writer.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 20}")

    async def record(step: int) -> int | None:
        try:
            await store.record_metrics("r", [Metric(step, f"{step}-" + "x" * 150, 0.0)] * 10)
            return step
        except StoreUnavailable as full:
            assert "full" in str(full)
            return None

    answers = await asyncio.gather(*(record(step) for step in range(500)))
    acknowledged = {step for step in answers if step is not None}
    assert acknowledged
    assert len(acknowledged) < 500
    found = await store.read(queries.list_metrics, "r", after=0, limit=10_000)
    assert {metric.step for _, metric in found} == acknowledged
    with store.database.writer.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert await record(501) == 501  # room was made
    await store.close()


async def test_an_operation_after_the_store_was_closed_is_refused(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    accepted = asyncio.create_task(store.create_run(RunSpec("r")))
    await asyncio.sleep(0)  # it is queued
    await store.close()
    assert (await accepted).id == "r"
    async with asyncio.timeout(30):
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.create_run(RunSpec("late"))
